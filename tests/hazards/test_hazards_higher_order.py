"""cond and flex_attention, kept as they are with low work around them; vmap and func.grad."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, SETTINGS, assert_near, check, leaf
from module_of import module_of
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from versions import since

from mpcompile import compiled_plans, mpcompile


@pytest.mark.slow("a matrix of trainings against FP64")
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

    def forward(m: Any, x: torch.Tensor) -> Any:
        q, k, v = m.qkv(x).view(1, 128, 3, 2, 16).permute(2, 0, 3, 1, 4)
        score = None if masked else relative
        h = flex_attention(q, k, v, score_mod=score, block_mask=mask)
        assert isinstance(h, torch.Tensor)
        return m.out(h.transpose(1, 2).reshape(1, 128, 32))

    model = module_of(forward, qkv=nn.Linear(32, 96), out=nn.Linear(32, 32))
    model.requires_grad_(False)
    check(model, torch.randn(1, 128, 32), level=level, low=["linear"])


@SETTINGS
def test_vmap(level: str, emit: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: torch.tanh(w @ row))(F.linear(x, w)) @ w

    w = (torch.randn(16, 16) / 4).requires_grad_()  # a tanh that is not all flat
    low = ["linear", "mm", "matmul"]
    check(program, leaf(8, 16), w, level=level, emit=emit, low=low)


@SETTINGS
def test_gradient_inside_the_program(level: str, emit: str) -> None:
    """A force: the gradient of an energy by the input, which a loss differentiates once more."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        force = torch.func.grad(lambda z: torch.tanh(m.a(z)).pow(2).sum())(x)
        return m.b(force)

    model = module_of(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16))
    check(model, torch.randn(8, 16), level=level, emit=emit, low=["linear"])


@LEVELS
def test_jacobian_of_a_low_program(level: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w)
        return torch.func.jacrev(lambda z: (z**2).sum(-1))(h) @ w

    check(program, leaf(4, 16), leaf(16, 16), level=level, low=["linear"])


def products_and_tangents(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Forward mode, and a pullback, of a function of low values."""
    h = F.linear(x, w)
    out, tangent = torch.func.jvp(lambda z: torch.tanh(z @ w), (h,), (torch.ones_like(h),))
    again, pull = torch.func.vjp(lambda z: torch.tanh(z @ w), h)
    return F.linear(out + tangent + pull(again)[0], w)


def loop_of_known_length(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def step(carry: torch.Tensor, row: torch.Tensor) -> Any:
        carry = torch.tanh(carry @ w + row)
        return carry, carry * 1

    _, rows = scan(step, torch.zeros(16), F.linear(x, w))
    return F.linear(rows, w)


@SETTINGS
@pytest.mark.parametrize(
    "program",
    [
        products_and_tangents,
        pytest.param(
            loop_of_known_length, marks=since("2.13", "AOTAutograd takes its results for aliases")
        ),
    ],
)
def test_other_transforms(program: Any, level: str, emit: str) -> None:
    w = (torch.randn(16, 16) / 4).requires_grad_()
    check(program, leaf(4, 16), w, level=level, emit=emit, low=["linear"])


def _cond(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def both(a: torch.Tensor) -> torch.Tensor:
        return torch.cond(a.sum() > 1, lambda a: a @ w, lambda a: a * 2, (a,))

    return torch.cond(x.sum() > 0, both, lambda a: F.linear(a, w) + torch.mm(a, w), (x,))


def _scan(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    _, rows = scan(lambda h, row: (torch.tanh(h @ w) + row, h * 2), x[0], x)
    return rows


def _map(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch._higher_order_ops.map(lambda row, w: torch.einsum("i,ij->j", row, w), x, w)


def _while_loop(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    start = (torch.zeros((), dtype=torch.int64), x.detach())
    with torch.no_grad():
        loop = torch._higher_order_ops.while_loop
        return loop(lambda i, h: i < 3, lambda i, h: (i + 1, h.matmul(w) / 4), start)[1]


@pytest.mark.parametrize(("inside", "count"), [(_cond, 3), (_scan, 1), (_map, 1), (_while_loop, 1)])
def test_the_plan_counts_the_products_inside(inside: Any, count: int) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(inside(F.linear(x, w), w), w)

    compiled = mpcompile(program, dtype=torch.float16, emit="eager", strict=True)
    compiled(torch.rand(8, 16), torch.rand(16, 16) / 16)
    (plan,) = compiled_plans(compiled)
    holders = [node for node in plan.nodes if node.products]
    assert sum(node.products for node in holders) == count
    assert sum(node["products"] for node in plan.to_dict()["nodes"]) == count
    for node in holders:
        assert node.precision == "KEEP"
        assert f"; {node.products} matrix product" in node.reason
        assert node.reason in plan.full()
    assert f"matrix products in opaque calls, all FP32: {count}\n" in plan.full()
    assert f"in FP32: {count} in calls whose bodies are not rewritten\n" in str(plan)


def test_products_under_an_autocast_of_ones_own_are_not_counted_as_fp32() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.cond(
                x.sum() > 0, lambda a: a @ w, lambda a: (a * 2).to((a @ w).dtype), (x,)
            )

    compiled = mpcompile(program, dtype=torch.bfloat16, emit="eager", strict=True)
    compiled(torch.rand(8, 16), torch.rand(16, 16))
    assert "opaque" in compiled_plans(compiled)[0].full()
    assert not any(node.products for node in compiled_plans(compiled)[0].nodes)


@LEVELS
def test_a_plan_without_opaque_calls_counts_none(level: str) -> None:
    compiled = mpcompile(F.linear, dtype=torch.float16, level=level, emit="eager", strict=True)
    compiled(torch.rand(8, 16), torch.rand(16, 16))
    (plan,) = compiled_plans(compiled)
    assert plan.counts()["LOW"] == 1
    assert not any(node.products for node in plan.nodes)
    assert "opaque" not in plan.full()
    assert "not rewritten" not in str(plan)
