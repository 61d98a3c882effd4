"""autograd.Function: its backward is kept, and sees gradients true to size."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, SETTINGS, check, fallback_reason, leaf
from fuzz_programs import AddTo, Clip, Straight
from torch import nn
from versions import since

from mpcompile import MPCompileWarning, mpcompile

BIG_SCALE = 2.0**15


class ScaledMatmul(torch.autograd.Function):
    """Two inputs, saved tensors, a number, two outputs of which one is not differentiable."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, factor: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        y = x @ w * factor
        best = y.argmax(-1)
        ctx.mark_non_differentiable(best)
        return y, best

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _best: Any) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return grad @ w.t() * ctx.factor, x.t() @ grad * ctx.factor * 2, None


class TwoOutputs(torch.autograd.Function):
    """Both outputs differentiable; an input that needs no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(mask)
        return x * mask, x.sum(-1)

    @staticmethod
    def backward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> Any:  # type: ignore[override]
        (mask,) = ctx.saved_tensors
        return left * mask * 0.5 + right.unsqueeze(-1) * 4, None


class Around(nn.Module):
    """Low-precision work before and after a function of the user's own."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(16, 16), nn.Linear(16, 8)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.function(self.before(x))
        return self.after(h)


FUNCTIONS = {
    "straight_through": lambda h: Straight.apply(h * 4),
    "clip": lambda h: Clip.apply(h),
    "non_differentiable": lambda h: ScaledMatmul.apply(h, h.t() @ h, 0.5)[0],
    "mark_dirty": lambda h: AddTo.apply(h * 1, h),
    "two_outputs": lambda h: sum_of(TwoOutputs.apply(h, h.detach() > 0)),
}


def sum_of(results: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return results[0] + results[1].unsqueeze(-1)


@pytest.mark.slow("a matrix of trainings against FP64")
@SETTINGS
@pytest.mark.parametrize("name", FUNCTIONS)
def test_autograd_function_keeps_its_backward(name: str, level: str, emit: str) -> None:
    check(Around(FUNCTIONS[name]), leaf(8, 16), level=level, emit=emit, low=["linear"])


@LEVELS
def test_nonlinear_backward_sees_gradients_true_to_size(level: str) -> None:
    """At a scale of 32768 every scaled gradient would be clipped."""
    check(Around(Clip.apply), leaf(8, 16), level=level, loss_scale=BIG_SCALE)


@LEVELS
def test_integer_output_of_autograd_function(level: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        return ScaledMatmul.apply(F.linear(x, w), w, 2.0)

    check(program, leaf(8, 16), leaf(16, 16), level=level, low=["linear"])


@SETTINGS
def test_result_of_a_function_is_written(level: str, emit: str) -> None:
    """Autograd forbids it for views that an autograd.Function returns; ours must be none."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = Clip.apply(F.linear(x, w))
        h.mul_(2)
        h[:, 0] = 1
        return F.linear(h, w)

    check(program, leaf(8, 16), leaf(16, 16), level=level, emit=emit, low=["linear"])


def read_again(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w) * 1
    view = h.view(-1)
    AddTo.apply(h, x)  # type: ignore[no-untyped-call]
    return F.linear(view.view(8, 16), w)


@LEVELS
@since("2.13", "Dynamo itself loses the history of what such a function writes")
def test_dirty_argument_read_again(level: str) -> None:
    """The write's history reaches the later read in FP32; scaled, it could not: said so."""
    reason = fallback_reason(read_again, leaf(8, 16), leaf(16, 16), level=level)
    assert "which is read again after it" in reason


@LEVELS
def test_dirty_argument_read_again_has_its_new_values(level: str) -> None:
    fast = mpcompile(read_again, dtype=torch.float16, level=level, emit="eager")
    x, w = leaf(8, 16), leaf(16, 16)
    with pytest.warns(MPCompileWarning, match="which is read again after it"):
        found = fast(x, w)
    torch.testing.assert_close(found, read_again(x, w))
