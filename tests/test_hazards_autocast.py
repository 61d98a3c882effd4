"""autocast: regions of the user's own, and one around the whole call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from compare import LEVELS, SETTINGS, Compared, assert_near, check, leaf
from torch import nn

from mpcompile import compiled_plans, mpcompile


def planned(result: Compared, op: str) -> list[str]:
    """The result types of this operator, in program order."""
    return [
        node.planned.partition("[")[0]
        for plan in result.plans
        for node in plan.nodes
        if node.op == f"aten::{op}"
    ]


@LEVELS
def test_disabled_autocast_keeps_fp32(level: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w)
        with torch.autocast("cpu", enabled=False):
            h = F.linear(h * 1, w)
        return F.linear(h, w)

    result = check(program, leaf(8, 16), leaf(16, 16), level=level)
    assert planned(result, "linear") == ["f16", "f32", "f16"]


@LEVELS
def test_bf16_autocast_inside_fp16(level: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w)
        with torch.autocast("cpu", torch.bfloat16):
            h = F.linear(h.float(), w)
            with torch.autocast("cpu", enabled=False):
                h = F.linear(h.float(), w)
            h = F.linear(h, w)
        return F.linear(h.float(), w)

    result = check(program, leaf(8, 16), leaf(16, 16), level=level, tolerance=5e-2)
    assert planned(result, "linear") == ["f16", "bf16", "f32", "bf16", "f16"]


@SETTINGS
def test_call_under_an_ambient_autocast(level: str, emit: str) -> None:
    """The whole program in FP16 as asked; autocast outside adds nothing to it."""
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    reference = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    reference.load_state_dict(model.state_dict())
    mpcompile(model, dtype=torch.float16, level=level, emit=emit, strict=True)
    x = torch.randn(8, 16)
    reference(x).mean().backward()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    out.float().mean().backward()
    (plan,) = compiled_plans(model)
    assert plan.counts()["LOW"] >= 2
    for a, e in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(a.grad, e.grad, "gradient", 5e-2)


@LEVELS
def test_graph_break_inside_a_region(level: str) -> None:
    """Dynamo leaves the region with the first graph and enters it again with the second."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w)
        with torch.autocast("cpu", enabled=False):
            h = F.linear(h, w)
            torch._dynamo.graph_break()
            h = F.linear(h, w)
        return F.linear(h, w)

    result = check(program, leaf(8, 16), leaf(16, 16), level=level, loss_scale=64.0)
    assert planned(result, "linear") == ["f16", "f32", "f32", "f16"]
