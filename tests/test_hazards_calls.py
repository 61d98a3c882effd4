"""Calls the passes must not look into, or must keep whole: custom operators, higher-order operators,
functorch transforms, functions put in the graph by hand, recurrent layers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_near, check, weighted_sum
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from mpcompile import mpcompile, ops, register_rule

LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(size, requires_grad=True)


# -- custom operators ---------------------------------------------------------------------------------

seen: list[torch.dtype] = []  # of each custom operator's input and gradient


@torch.library.custom_op("mpcompile_test::cube", mutates_args=())
def cube(x: torch.Tensor, factor: float) -> torch.Tensor:
    seen.append(x.dtype)
    return x**3 * factor


@cube.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
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
def _(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
def _(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
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
    del ops._REGISTERED["mpcompile_test::cube"]


@LEVELS
def test_registered_rule_lowers_a_custom_operator(level: str, rule_for_cube: None) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return cube(F.linear(x, w), 0.1)

    seen.clear()
    check(program, leaf(8, 16), leaf(16, 16), level=level, low=["mpcompile_test::cube"])
    assert torch.float16 in seen


# -- higher-order operators -----------------------------------------------------------------------------


@SETTINGS
def test_cond(level: str, emit: str) -> None:
    """Its branches are captured in FP32; what stands around it is low."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w)
        h = torch.cond(h.detach().sum() > 0, lambda a: torch.sin(a @ w), lambda a: a * 2 + 1, (h,))
        return F.linear(h, w)

    for sign in (1, -1):
        w = (torch.ones(16, 16) * sign / 8 + torch.randn(16, 16) / 50).requires_grad_()
        x = torch.rand(8, 16).requires_grad_()
        torch._dynamo.reset()
        check(program, x, w, level=level, emit=emit, low=["linear"])


@LEVELS
def test_cond_takes_either_branch_of_one_compilation(level: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w)
        return torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a - 1, (h,))

    fast = mpcompile(program, dtype=torch.float16, level=level, emit="eager", strict=True)
    w = torch.randn(4, 16)
    for x in (torch.rand(8, 16), -torch.rand(8, 16)):
        assert_near(fast(x, w), program(x, w), "output", 1e-2)


def relative(score: torch.Tensor, b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return score + (q - k) * 0.01


def causal(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q >= k


@LEVELS
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention(level: str, masked: bool) -> None:
    """On CPU torch has its forward only."""
    mask = create_block_mask(causal, None, None, 128, 128, device="cpu") if masked else None

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).view(1, 128, 3, 2, 16).permute(2, 0, 3, 1, 4)
            score = None if masked else relative
            h = flex_attention(q, k, v, score_mod=score, block_mask=mask)
            assert isinstance(h, torch.Tensor)
            out: torch.Tensor = self.out(h.transpose(1, 2).reshape(1, 128, 32))
            return out

    model = Attention().requires_grad_(False)
    check(model, torch.randn(1, 128, 32), level=level, low=["linear"])


# -- functorch ------------------------------------------------------------------------------------------


@SETTINGS
def test_vmap(level: str, emit: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: torch.tanh(w @ row))(F.linear(x, w)) @ w

    check(program, leaf(8, 16), leaf(16, 16), level=level, emit=emit, low=["linear", "matmul"])


@SETTINGS
def test_gradient_inside_the_program(level: str, emit: str) -> None:
    """A force: the gradient of an energy by the input, which a loss differentiates once more."""

    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            force = torch.func.grad(lambda z: torch.tanh(self.a(z)).pow(2).sum())(x)
            out: torch.Tensor = self.b(force)
            return out

    check(Force(), torch.randn(8, 16), level=level, emit=emit, low=["linear"])


@LEVELS
def test_jacobian_of_a_low_program(level: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w)
        return torch.func.jacrev(lambda z: (z**2).sum(-1))(h) @ w

    check(program, leaf(4, 16), leaf(16, 16), level=level, low=["linear"])


# -- functions put in the graph by hand ------------------------------------------------------------------


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.clamp(-0.01, 0.01)


@SETTINGS
def test_function_allowed_in_graph(level: str, emit: str) -> None:
    """Dynamo does not look into it, so nothing but its result tells of the backward inside."""

    @torch._dynamo.allow_in_graph
    def clipped(x: torch.Tensor) -> Any:
        return Clipped.apply(x)

    @torch._dynamo.allow_in_graph
    def harmless(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(clipped(harmless(F.linear(x, w))), w)

    result = check(program, leaf(8, 16), leaf(16, 16), level=level, emit=emit, low=["linear"])
    assert result.ops("KEEP") == ["gelu", "clipped"]  # the one beside the other might be written


@SETTINGS
def test_autograd_function_under_autocast(level: str, emit: str) -> None:
    """Inside a region, and under an ambient one: it runs in the dtype autocast gives it."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            y = x @ w
            assert y.dtype is torch.bfloat16
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
        assert out.dtype is torch.bfloat16
        grads.append(torch.autograd.grad(weighted_sum(out.float()), inputs))
    for expected, actual in zip(*grads, strict=True):
        assert_near(actual, expected, "gradient", 5e-2)


# -- recurrent layers --------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Linear(8, 16), layer, nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, _ = self.layer(self.embed(x))
        out: torch.Tensor = self.head(h)
        return out


LAYERS = {
    "lstm": lambda: nn.LSTM(16, 16, num_layers=2),
    "gru": lambda: nn.GRU(16, 16, batch_first=True),
    "rnn_tanh": lambda: nn.RNN(16, 8, bidirectional=True),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layer_is_one_low_node(name: str, dtype: torch.dtype) -> None:
    model = Recurrent(LAYERS[name]())
    options = {"dtype": dtype, "level": "O2", "emit": "aot_eager"}
    result = check(model, leaf(5, 3, 8), low=["linear", name], **options)
    assert result.ops("LOW").count(name) == 1


@pytest.mark.parametrize("sizes", [(1, 1), (16, 32), (40, 64)])
def test_asking_for_a_recurrent_kernel_is_safe(sizes: tuple[int, int]) -> None:
    """The probe once handed oneDNN weights that did not fit together: it corrupted the heap."""
    model = nn.LSTM(*sizes, num_layers=2, proj_size=0)
    check(model, leaf(3, 2, sizes[0]), dtype=torch.bfloat16, low=["lstm"])


@pytest.mark.slow
def test_long_lstm_compiles_quickly() -> None:
    model = mpcompile(Recurrent(nn.LSTM(16, 16, num_layers=2)), dtype=torch.float16, strict=True)
    start = time.perf_counter()
    model(torch.randn(200, 4, 8)).mean().backward()
    assert time.perf_counter() - start < 60


# -- what can't be rewritten -------------------------------------------------------------------------------


def test_tensor_subclass_is_left_in_fp32() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def program(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    pair = TwoTensor(torch.randn(4, 4), torch.randn(4, 4))
    fast = mpcompile(program, dtype=torch.float16, emit="eager")
    with pytest.warns(match="left a graph in FP32: an input is a tensor subclass") as caught:
        out = fast(pair)
    assert len(caught) == 1
    assert torch.equal(out.a, pair.a @ pair.a)
    strict = mpcompile(program, dtype=torch.float16, emit="eager", strict=True)
    with pytest.raises(Exception, match=r"tensor subclass \(TwoTensor\).*Without strict=True"):
        strict(pair)


def test_fallback_keeps_an_ambient_autocast() -> None:
    """Compiled unchanged means: as torch.compile would have."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: w @ row)(x)

    fast = mpcompile(program, dtype=torch.float16, emit="aot_eager")
    x, w = torch.randn(8, 16), torch.randn(16, 16)
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(match="under autocast"):
        out = fast(x, w)
    assert out.dtype is torch.bfloat16
