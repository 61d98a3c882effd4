"""Weights in half precision that are refused, and graphs that stay as they are for their sake."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from mpcompile import MPCompileError, MPCompileWarning, compiled_plans, mpcompile

BF16 = torch.bfloat16


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_trained_fp16_weights_are_refused(level: str) -> None:
    with pytest.raises(MPCompileError, match=r"weight is float16.*model\.float\(\)"):
        mpcompile(nn.Linear(4, 4).half(), level=level)
    other = torch.compile(nn.Linear(4, 4).half(), backend="mpcompile", options={"level": level})
    with pytest.raises(Exception, match=r"shape \(4, 4\) is float16.*model\.float\(\)"):
        other(torch.randn(2, 4).half())
    with torch.no_grad():
        assert other(torch.randn(2, 4).half()).dtype is torch.float16


def test_the_dtype_is_that_of_the_weights() -> None:
    model = nn.Linear(4, 4).half().requires_grad_(False)
    mpcompile(model, emit="aot_eager", strict=True)
    model(torch.randn(2, 4).half())
    (plan,) = compiled_plans(model)
    assert plan.dtype == "float16"


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype is BF16
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        assert grad.dtype is BF16
        return grad * 2


class WithFunction(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(super().forward(x))


@pytest.mark.parametrize(
    "make", [lambda: WithFunction(8, 8), lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))]
)
def test_what_only_knows_its_dtype_or_is_written_stays_as_it_is(make: Any) -> None:
    """A user's function keeps getting BF16, and running statistics are updated."""
    model = make().to(BF16)
    plain = copy.deepcopy(model)
    mpcompile(model, emit="aot_eager")
    x = torch.randn(16, 8, dtype=BF16)
    with pytest.warns(MPCompileWarning, match="left a graph as it is"):
        mine = model(x)
    theirs = plain(x)
    mine.float().square().sum().backward()
    theirs.float().square().sum().backward()
    torch.testing.assert_close(mine, theirs)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


def test_a_view_of_a_weight_is_one() -> None:
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), self.weight.t()

    model = mpcompile(Model(4, 4).to(BF16), emit="aot_eager", strict=True)
    _, view = model(torch.randn(2, 4, dtype=BF16))
    assert view.data_ptr() == model.weight.data_ptr()
