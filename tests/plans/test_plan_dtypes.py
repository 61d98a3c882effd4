"""Where a policy or an autocast region gives a node another low dtype, the plan names that one."""

import json
from typing import Any

import pytest
import torch
from torch import nn

from mpcompile import Policy, compiled_plans, explain, mpcompile


class Net(nn.Module):
    def __init__(self, autocast: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.autocast = nn.Linear(16, 16), nn.Linear(16, 16), autocast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            h = self.a(x)
        return self.b(h.float().relu())


def by_policy(**options: Any) -> Net:
    return mpcompile(Net(), policy=Policy(modules={"a": "bf16"}), **options)


def by_autocast(**options: Any) -> Net:
    return mpcompile(Net(autocast=True), **options)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("made", [by_policy, by_autocast])
def test_of_a_compiled_module(made: Any, level: str) -> None:
    model = made(dtype=torch.float16, level=level, emit="eager")
    model(torch.rand(4, 16)).sum().backward()
    (plan,) = compiled_plans(model)
    low = {node.module: node.low for node in plan.nodes if node.op == "aten::linear"}
    assert low == {"a": "bfloat16", "b": ""}
    lines = str(plan).splitlines()
    assert lines[0].startswith(f"{level} on cpu: 2 of 2 products in BF16/FP16")
    rows = {line.split()[0]: line for line in lines if line[:2] in ("a ", "b ")}
    assert "BF16" in rows["a"]
    assert "FP16" in rows["b"]
    assert "BF16" in str(plan.why("a"))
    assert str(plan.full()).startswith(f"{level} bfloat16/float16 on cpu")
    data = json.loads(json.dumps(plan.to_dict()))
    assert [n["low"] for n in data["nodes"] if n["op"] == "aten::linear"] == ["bfloat16", ""]
    assert type(plan).from_dict(data).low_dtypes == ["bfloat16", "float16"]


def test_of_an_explained_module(tmp_path: Any) -> None:
    html = tmp_path / "plan.html"
    plan = explain(
        Net(), torch.rand(4, 16),
        dtype=torch.float16, policy=Policy(modules={"a": "bf16", "b": "bf16"}),
    )  # fmt: skip
    plan.to_html(html)
    assert "2 of 2 products in BF16," in str(plan)
    text = html.read_text()
    assert "LOW, BF16" in text
    assert "FP16" not in text.partition("<script")[0]


def test_what_was_decided_for_all_is_said_once() -> None:
    model = mpcompile(Net(), dtype=torch.bfloat16, emit="eager")
    model(torch.rand(4, 16))
    (plan,) = compiled_plans(model)
    assert {node.low for node in plan.nodes} == {""}
    assert plan.low_dtypes == ["bfloat16"]
