"""Operators and functions of the users' own: custom operators, and autograd.Function, whose
backward is kept and sees gradients true to size.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, SETTINGS, assert_near, check, fallback_reason, leaf, weighted_sum
from fuzz_programs import AddTo, Clip, Straight
from module_of import module_of
from torch import nn
from versions import since

from mpcompile import MPCompileWarning, mpcompile, register_rule
from mpcompile.rules import lookup

# -- operators -------------------------------------------------------------------------------------


seen: list[torch.dtype] = []  # of each custom operator's input and gradient


@torch.library.custom_op("mpcompile_test::cube", mutates_args=())
def cube(x: torch.Tensor, factor: float) -> torch.Tensor:
    seen.append(x.dtype)
    return x**3 * factor


@cube.register_fake
def _cube_fake(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


def _cube_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.factor = inputs[1]


def _cube_backward(ctx: Any, grad: torch.Tensor) -> Any:
    seen.append(grad.dtype)
    (x,) = ctx.saved_tensors
    return (3 * x**2 * ctx.factor * grad).clamp(-0.02, 0.02), None


cube.register_autograd(_cube_backward, setup_context=_cube_setup)


@torch.library.custom_op("mpcompile_test::split_off", mutates_args=())
def split_off(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[rows] * 2, x.sum(-1)


@split_off.register_fake
def _split_fake(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(rows.shape[0], x.shape[1]), x.new_empty(x.shape[0])


def _split_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.shape = inputs[0].shape


def _split_backward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> Any:
    (rows,) = ctx.saved_tensors
    grad = right.unsqueeze(-1).expand(ctx.shape).clone()
    return grad.index_add(0, rows, left * 2), None


split_off.register_autograd(_split_backward, setup_context=_split_setup)


@torch.library.custom_op("mpcompile_test::bump", mutates_args=("counter",))
def bump(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    counter += x.detach().abs().mean()
    return x.clone()


@bump.register_fake
def _bump_fake(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@SETTINGS
def test_custom_operator_gets_captured_dtypes_and_true_gradients(level: str, emit: str) -> None:
    """FP32 in both directions; its clamp would bite at a scale of 1024."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(cube(F.linear(x, w), 0.1), w)

    seen.clear()
    check(program, leaf(8, 16), leaf(16, 16), level=level, emit=emit, low=["linear"])
    assert set(seen) == {torch.float32}


@LEVELS
def test_custom_operator_with_two_results(level: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        some, total = split_off(F.linear(x, w), rows)
        return F.linear(some, w) + total.mean()

    check(program, leaf(8, 16), leaf(16, 16), torch.tensor([1, 5, 5]), level=level, low=["linear"])


@SETTINGS
def test_custom_operator_that_writes(level: str, emit: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        bump(F.linear(x, w).detach(), counter)
        return F.linear(x, w) + counter

    check(program, leaf(8, 16), leaf(16, 16), torch.zeros(()), level=level, emit=emit)


@pytest.fixture
def rule_for_cube() -> Iterator[None]:
    register_rule("mpcompile_test::cube", "low", "it says so")
    yield
    del lookup._REGISTERED["mpcompile_test::cube"]


@LEVELS
def test_registered_rule_lowers_a_custom_operator(level: str, rule_for_cube: None) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return cube(F.linear(x, w), 0.1)

    seen.clear()
    check(program, leaf(8, 16), leaf(16, 16), level=level, low=["mpcompile_test::cube"])
    assert torch.float16 in seen


@SETTINGS
def test_function_allowed_in_graph(level: str, emit: str) -> None:
    """Dynamo does not look into it, so nothing but its result tells of the backward inside."""

    @torch._dynamo.allow_in_graph
    def clipped(x: torch.Tensor) -> Any:
        return Clip.apply(x)

    @torch._dynamo.allow_in_graph
    def harmless(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(clipped(harmless(F.linear(x, w))), w)

    result = check(program, leaf(8, 16), leaf(16, 16), level=level, emit=emit, low=["linear"])
    assert result.ops("KEEP") == ["gelu", "clipped"]  # the one beside the other might be written


@SETTINGS
def test_autograd_function_under_autocast(level: str, emit: str) -> None:
    """Inside a region it runs in the dtype autocast gives it; under an ambient one in FP32."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            y = x @ w
            autocast = torch.is_autocast_enabled("cpu")
            assert y.dtype is (torch.bfloat16 if autocast else torch.float32)
            return y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            x, w = ctx.saved_tensors
            return (grad.float() @ w.t().float()) * 3, x.t().float() @ grad.float()

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w)
        with torch.autocast("cpu", torch.bfloat16):
            h = Product.apply(h, w)
        return F.linear(h.float(), w)

    inputs = leaf(8, 16), leaf(16, 16)
    check(program, *inputs, level=level, emit=emit, low=["linear"], tolerance=5e-2)

    def ambient(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(Product.apply(F.linear(x, w), w), w)

    options = {"level": level, "emit": emit, "loss_scale": 128.0, "strict": True}
    fast = mpcompile(ambient, dtype=torch.float16, **options)
    grads = []
    for run in (ambient, fast):
        with torch.autocast("cpu", torch.bfloat16):
            out = run(*inputs)
        assert out.dtype is (torch.bfloat16 if run is ambient else torch.float32)
        grads.append(torch.autograd.grad(weighted_sum(out.float()), inputs))
    for expected, actual in zip(*grads, strict=True):
        assert_near(actual, expected, "gradient", 5e-2)


@LEVELS
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_losses_of_one_sample_are_scalars(reduction: str, level: str) -> None:
    def program(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Any:
        scores = weight @ x
        return (
            F.multilabel_margin_loss(scores, labels, reduction=reduction),
            F.multi_margin_loss(scores, labels[0], reduction=reduction),
            F.multi_margin_loss(scores, labels[:1], reduction=reduction),
            F.multilabel_margin_loss(scores[None], labels[None], reduction=reduction),
        )

    labels = torch.tensor([0, 2, -1, 1, 1, 1])
    check(program, leaf(8), leaf(6, 8), labels, level=level, emit="aot_eager", low=["matmul"])


# -- autograd.Function -----------------------------------------------------------------------------


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


def around(function: Any) -> Any:
    """Low-precision work before and after a function of the user's own."""
    layers = {"before": nn.Linear(16, 16), "after": nn.Linear(16, 8)}
    return module_of(lambda m, x: m.after(function(m.before(x))), **layers)


FUNCTIONS = {
    "straight_through": lambda h: Straight.apply(h * 4),
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
    check(around(FUNCTIONS[name]), leaf(8, 16), level=level, emit=emit, low=["linear"])


@LEVELS
def test_nonlinear_backward_sees_gradients_true_to_size(level: str) -> None:
    """At a scale of 32768 every scaled gradient would be clipped."""
    check(around(Clip.apply), leaf(8, 16), level=level, loss_scale=BIG_SCALE)


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
