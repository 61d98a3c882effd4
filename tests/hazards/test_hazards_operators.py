"""Custom operators, and functions put in the graph by hand."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, SETTINGS, assert_near, check, leaf, weighted_sum
from fuzz_programs import Clip

from mpcompile import mpcompile, register_rule
from mpcompile.rules import lookup

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
