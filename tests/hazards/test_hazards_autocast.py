"""autocast: regions of the user's own, and one around the whole call."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, SETTINGS, Compared, check, leaf
from torch import nn

from mpcompile import explain, mpcompile


def planned(result: Compared, op: str) -> list[str]:
    """The result types of this operator, in program order."""
    return [
        node.planned.partition("[")[0]
        for plan in result.plans
        for node in plan.nodes
        if node.op == f"aten::{op}"
    ]


def disabled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    with torch.autocast("cpu", enabled=False):
        h = F.linear(h * 1, w)
    return F.linear(h, w)


def bf16_inside_fp16(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        h = F.linear(h.float(), w)
        with torch.autocast("cpu", enabled=False):
            h = F.linear(h.float(), w)
        h = F.linear(h, w)
    return F.linear(h.float(), w)


def broken_inside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Dynamo leaves the region with the first graph and enters it again with the second."""
    h = F.linear(x, w)
    with torch.autocast("cpu", enabled=False):
        h = F.linear(h, w)
        torch._dynamo.graph_break()
        h = F.linear(h, w)
    return F.linear(h, w)


@LEVELS
@pytest.mark.parametrize(
    ("program", "types", "options"),
    [
        (disabled, "f16 f32 f16", {}),
        (bf16_inside_fp16, "f16 bf16 f32 bf16 f16", {"tolerance": 5e-2}),
        (broken_inside, "f16 f32 f32 f16", {"loss_scale": 64.0}),
    ],
)
def test_a_region_of_the_users_own(
    program: Any, types: str, options: dict[str, Any], level: str
) -> None:
    result = check(program, leaf(8, 16), leaf(16, 16), level=level, **options)
    assert planned(result, "linear") == types.split()


def _filled(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(8, 16, dtype=h.dtype)
    out[:, torch.tensor([0, 1])] = h[:, :2]
    return out + w[0]


def _gathered(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(8) % 2
    return torch.zeros(2, 16, dtype=h.dtype).index_add(0, rows, h) @ w.to(h.dtype)


OTHERS_DTYPE = {
    "a product": lambda h, w: h @ w.to(h.dtype),
    "a sum by index": _gathered,
    "a write by index": _filled,
    "a norm's weight": lambda h, w: F.layer_norm(h, (16,), w[0].to(h.dtype)),
    "einsum": lambda h, w: torch.einsum("ij,jk->ik", h, w.to(h.dtype)),
    "prelu": lambda h, w: F.prelu(h, w[0].to(h.dtype)),
    "a mask": lambda h, w: F.scaled_dot_product_attention(
        h[None], h[None], h[None], attn_mask=(torch.arange(8) < 5).to(h.dtype).expand(8, 8)
    ) + w[0],
    "weights of classes": lambda h, w: F.cross_entropy(
        h @ w.t(), torch.arange(8), weight=torch.linspace(0.5, 2, 16).to(h.dtype)
    ),
    "its own method": lambda h, w: h.bfloat16() @ w.bfloat16(),
    "what is returned": lambda h, w: F.linear(h, w).to(h.dtype),
}  # fmt: skip


@SETTINGS
@pytest.mark.parametrize("around", [True, False], ids=["caller's", "own"])
@pytest.mark.parametrize("case", OTHERS_DTYPE)
def test_the_dtype_that_autocast_gave_to_another_value(
    case: str, around: bool, level: str, emit: str
) -> None:
    """Dynamo writes down what `h.dtype` is under autocast; the program is captured without it."""

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return OTHERS_DTYPE[case](F.linear(x, w), w)

    def with_region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return OTHERS_DTYPE[case](F.linear(x, w), w)

    program = plain if around else with_region
    ours, theirs = ([leaf(8, 16), leaf(16, 16)] for _ in range(2))
    for mine, other in zip(ours, theirs, strict=True):
        other.data.copy_(mine.data.mul_(0.3))  # small, or attention turns roundings into choices
    compiled = mpcompile(program, dtype=torch.bfloat16, level=level, emit=emit, strict=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        out = compiled(*ours)
    wanted = program(*theirs)  # the caller's region is none of the program
    assert out.dtype is wanted.dtype
    out.float().square().sum().backward()
    wanted.float().square().sum().backward()
    torch.testing.assert_close(out, wanted, rtol=5e-2, atol=5e-2)
    for mine, other in zip(ours, theirs, strict=True):
        scale = other.grad.abs().max().item()
        torch.testing.assert_close(mine.grad, other.grad, rtol=5e-2, atol=3e-2 * scale)


@torch.library.custom_op("mpcompile_test::rounded_to", mutates_args=())
def rounded_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).to(x.dtype, copy=True)


@rounded_to.register_fake
def _(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_custom_operator_gets_the_dtype_it_was_given() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return rounded_to(x * 2, torch.bfloat16)

    compiled = mpcompile(program, dtype=torch.bfloat16, emit="eager", strict=True)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x), program(x), rtol=0, atol=0)


class Broken(nn.Module):
    """A function with a graph break, called in a region that another function opens."""

    def __init__(self, dtype: torch.dtype | None, decorated: bool) -> None:
        super().__init__()
        self.first, self.kept, self.last = (nn.Linear(16, 16) for _ in range(3))
        self.region = torch.autocast("cpu", dtype, enabled=dtype is not None)
        self.decorated = decorated

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        x = self.kept(x)
        torch._dynamo.graph_break()
        return self.kept(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.decorated:
            x = self.region(self.inside)(x)
        else:
            with self.region:
                x = self.inside(x)
        return self.last(x.float())


@pytest.mark.slow("a matrix of trainings against FP64")
@pytest.mark.parametrize("decorated", [True, False], ids=["decorator", "with"])
@pytest.mark.parametrize(
    ("dtype", "kept"), [(None, "f32"), (torch.bfloat16, "bf16")], ids=["disabled", "bf16"]
)
@LEVELS
def test_graph_break_below_the_function_that_opens_a_region(
    level: str, dtype: torch.dtype | None, kept: str, decorated: bool
) -> None:
    """The graphs inside name no region: Python enters it."""
    model, x = Broken(dtype, decorated), leaf(8, 16)
    explained = explain(model, x, dtype=torch.float16, level=level)
    with torch.autocast("cpu", enabled=False):  # the caller's changes nothing
        result = check(model, x, level=level, tolerance=5e-2)
    assert planned(result, "linear") == ["f16", kept, kept, "f16"]
    assert [n.planned[:3] for n in explained.nodes if n.op == "aten::linear"] == [
        n.planned[:3] for plan in result.plans for n in plan.nodes if n.op == "aten::linear"
    ]
