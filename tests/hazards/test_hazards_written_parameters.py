"""Parameters that a forward writes, without a gradient, before it reads them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import LEVELS, check, fallback_reason, leaf
from module_of import module_of
from torch import nn


@torch.no_grad()
def decayed(m: Any) -> None:
    m.last.weight.mul_(0.9)
    m.last.weight.add_(0.01)


@torch.no_grad()
def normed(m: Any) -> None:
    m.last.weight.div_(m.last.weight.norm(dim=1, keepdim=True))


@torch.no_grad()
def pruned(m: Any) -> None:
    m.last.weight.copy_(torch.where(m.last.weight.abs() > 0.1, m.last.weight, 0.0))


@torch.no_grad()
def clamped_as_parameters(m: Any) -> None:
    for p in m.last.parameters():
        p.clamp_(-0.1, 0.1)


def clamped_as_data(m: Any) -> None:
    m.last.weight.data.clamp_(-0.1, 0.1)


def clamped_as_detached(m: Any) -> None:
    m.last.weight.detach().clamp_(-0.1, 0.1)


@torch.no_grad()
def a_row_of_zeros(m: Any) -> None:
    m.last.weight.index_fill_(0, torch.tensor([0]), 0.0)
    m.last.bias.masked_fill_(m.last.bias < 0, 0.0)


@torch.no_grad()
def a_diagonal(m: Any) -> None:
    m.last.weight.fill_diagonal_(1.0)


@torch.no_grad()
def averaged_with_another(m: Any) -> None:
    m.last.weight.lerp_(m.other.weight, 0.5)


@torch.no_grad()
def symmetric(m: Any) -> None:
    w = m.last.weight
    w.copy_((w + w.t()) / 2)


WRITES = [
    decayed, normed, pruned, clamped_as_parameters, clamped_as_data, clamped_as_detached,
    a_row_of_zeros, a_diagonal, averaged_with_another, symmetric,
]  # fmt: skip


def writing(write: Callable[[Any], None]) -> nn.Module:
    def forward(m: Any, x: torch.Tensor) -> Any:
        h = m.first(x).relu()
        write(m)
        return m.other(m.last(h))

    layers = {name: nn.Linear(16, 16) for name in ("first", "last", "other")}
    return module_of(forward, **layers)


@LEVELS
@pytest.mark.parametrize("write", WRITES)
def test_a_parameter_written_before_it_is_read(write: Any, level: str) -> None:
    """What is multiplied behind it stays in FP32, and no more."""
    result = check(
        writing(write), leaf(8, 16), level=level, emit="aot_eager", steps=3, low=["linear"]
    )
    wide = {n.module for plan in result.plans for n in plan.nodes
            if n.op == "aten::linear" and n.precision == "FULL"}  # fmt: skip
    assert wide <= {"last"}
    for p, q in zip(result.model.parameters(), result.reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@LEVELS
@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_a_table_that_is_renormalised(layer: Any, level: str) -> None:
    def forward(m: Any, ids: torch.Tensor) -> Any:
        return m.linear(m.table(ids))

    net = module_of(forward, table=layer(20, 16, max_norm=1.0), linear=nn.Linear(16, 4))
    ids = torch.randint(20, (8, 3))
    check(net, ids, level=level, emit="aot_eager", steps=2, low=["linear"])


def test_a_parameter_read_before_it_is_written() -> None:
    """Autograd itself refuses the backward of that: left in FP32, and said so."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        h = m.linear.weight * 2
        with torch.no_grad():
            m.linear.weight.clamp_(-0.1, 0.1)
        return m.linear(x) + h.sum()

    reason = fallback_reason(module_of(forward, linear=nn.Linear(16, 16)), torch.randn(8, 16))
    assert "linear_weight needs a gradient and is written without one" in reason
