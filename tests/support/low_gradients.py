"""What tests of the gradients of O2's working copies share: a small model, compiled and held by an
`MPOptimizer`, and the comparison of its gradients with those of a reference.
"""

from typing import Any

import torch
from copied_models import Net
from torch import nn

from mpcompile import LossScale, MPOptimizer, mpcompile

__all__ = ["MATRICES", "Net", "check", "inputs", "loss", "trained"]

FP16 = torch.float16


def trained(
    model: nn.Module, scale: LossScale | None = None, dtype: torch.dtype = FP16, **options: Any
) -> MPOptimizer:
    """Compile the model in place, without breaks, and hold it."""
    if dtype is FP16:
        options["loss_scale"] = scale or LossScale.dynamic(init_scale=2.0**10)
    mpcompile(model, level="O2", dtype=dtype, **{"emit": "eager", "fullgraph": True, **options})
    return MPOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), emit="eager")


def check(model: nn.Module, reference: nn.Module, rtol: float = 1e-2) -> list[str]:
    """Compare the gradients of two models. Returns the names of those that are stored low."""
    low = []
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        ours, wanted = p.grad, q.grad
        assert (ours is None) == (wanted is None), name
        if ours is not None and wanted is not None:
            assert (ours.double() - wanted).norm() <= rtol * wanted.norm(), name
            low += [name] if ours.dtype is not torch.float32 else []
    return low


MATRICES = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]  # all that has a copy


def inputs(net: nn.Module, rows: int = 4) -> torch.Tensor:
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
    return x.to(next(net.parameters()).dtype)


def loss(net: nn.Module, rows: int = 4) -> torch.Tensor:
    return net(inputs(net, rows)).square().mean()
