"""What tests of the gradients that O2 stores in FP16 share: a small model, compiled and held by an
`MPOptimizer`, and the comparison of its gradients with those of a reference.
"""

from __future__ import annotations

from typing import Any

import torch
from copied_models import Net
from torch import nn

from mpcompile import LossScale, MPOptimizer, mpcompile
from mpcompile.scaling.copies import copies_of

__all__ = ["MATRICES", "Net", "check", "inputs", "loss", "trained", "true"]


def trained(model: nn.Module, scale: LossScale | None = None, **options: Any) -> MPOptimizer:
    """Compile the model in place, in FP16 and without breaks, and hold it."""
    scale = scale or LossScale.dynamic(init_scale=2.0**10)
    options = {"emit": "eager", "fullgraph": True, "loss_scale": scale, **options}
    mpcompile(model, level="O2", dtype=torch.float16, **options)
    return MPOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), emit="eager")


def true(p: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a parameter, true to size."""
    if p.grad is None or p.grad.dtype is not torch.float16:
        return p.grad
    (kept,) = copies_of(p).values()
    assert kept.gradient.stored is not None
    return p.grad.double() / kept.gradient.stored.by


def check(model: nn.Module, reference: nn.Module) -> list[str]:
    """Compare the gradients of two models. Returns the names of those that are stored low."""
    low = []
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        ours, wanted = true(p), q.grad
        assert (ours is None) == (wanted is None), name
        if ours is not None and wanted is not None:
            assert (ours - wanted).norm() <= 1e-2 * wanted.norm(), name
            assert p.grad is not None
            low += [name] if p.grad.dtype is torch.float16 else []
    return low


MATRICES = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]  # all that has a copy


def inputs(net: nn.Module, rows: int = 4) -> torch.Tensor:
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
    return x.to(next(net.parameters()).dtype)


def loss(net: nn.Module, rows: int = 4) -> torch.Tensor:
    value: torch.Tensor = net(inputs(net, rows)).square().mean()
    return value
