"""Models that use other parameters in each step, under an MPOptimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from mpcompile import LossScale, MPOptimizer, loss_scale_of, mpcompile


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, kept: tuple[bool, ...]) -> torch.Tensor:
        for layer, keep in zip(self.layers, kept, strict=True):
            if keep:
                x = x + torch.relu(layer(x))
        out: torch.Tensor = self.head(x)
        return out


@pytest.mark.slow("steps of many patterns of absent gradients")
@pytest.mark.parametrize(("dtype", "level"), [(torch.float16, "O2"), (torch.bfloat16, "O1")])
def test_a_model_that_drops_layers(dtype: torch.dtype, level: str) -> None:
    """What each step does not reach stays as it was, and so does its working copy at O2."""
    torch.manual_seed(0)
    model = Layers()
    compiled = mpcompile(
        model, dtype=dtype, level=level, emit="eager", loss_scale=LossScale.dynamic(2.0**8)
    )  # fmt: skip
    optimizer = MPOptimizer(AdamW(model.parameters(), lr=0.01), emit="eager", max_grad_norm=1.0)
    for step in range(8):
        kept = tuple(bool((step * 5 + 3) >> i & 1) for i in range(4))
        optimizer.zero_grad()
        compiled(torch.randn(4, 8), kept).square().mean().backward()
        before = {n: (p.detach().clone(), _copied(optimizer.state.get(p, {})))
                  for n, p in model.named_parameters()}  # fmt: skip
        optimizer.step()
        assert not optimizer.skipped
        for name, p in model.named_parameters():
            same = torch.equal(before[name][0], p)
            assert same is (p.grad is None), name
            if p.grad is None:
                assert _copied(optimizer.state.get(p, {})) == before[name][1]
    assert optimizer.compilations == 1
    assert loss_scale_of(compiled).skipped_steps == 0


@pytest.mark.slow("steps of many patterns of absent gradients")
def test_experts_that_have_another_loss_scale_than_the_rest() -> None:
    """Those that have not run yet are taken to be like the others."""
    torch.manual_seed(0)
    head = mpcompile(nn.Linear(4, 2), dtype=torch.float16, emit="eager", loss_scale=8.0)
    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))  # uncompiled: not scaled
    params = [*experts.parameters(), *head.parameters()]
    optimizer = MPOptimizer(AdamW(params, lr=0.01), emit="eager")
    for step in range(10):
        optimizer.zero_grad()
        used = {7 - step % 8, 3 * step % 8}
        hidden = torch.stack([experts[i](torch.randn(3, 4)) for i in used]).sum(0)
        head(hidden).square().mean().backward()
        optimizer.step()
    assert optimizer.compilations == 1


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.tolist() for k, v in state.items()}
