"""Dumps and plans: readable, complete, true."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpcompile import compiled_plans, mpcompile
from mpcompile.plans.pipeline import PASSES


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmax(F.relu(self.proj(x), inplace=True), -1)  # the line of the softmax


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    model = mpcompile(Net(), dtype=torch.float16, emit="eager", dump=tmp_path, strict=True)
    model(torch.randn(4, 8)).sum().backward()
    (plan,) = compiled_plans(model)
    assert plan.dump_dir.parent == tmp_path
    return plan.dump_dir


def test_the_graph_before_after_each_pass_and_at_the_end(dumped: Path) -> None:
    stages = ["captured", *(p.__name__ for p in PASSES)]
    names = [f"{i:02}_{name}.txt" for i, name in enumerate(stages)]
    assert sorted(p.name for p in dumped.iterdir()) == sorted([*names, "plan.json"])
    captured = (dumped / names[0]).read_text()
    assert "relu_: f32[4, 8] = relu_(linear)" in captured
    assert "f16" not in captured
    final = (dumped / names[-1]).read_text()
    assert "linear: f16[4, 8] = linear(" in final


def _stage(directory: Path, name: str) -> str:
    (path,) = directory.glob(f"[0-9][0-9]_{name}.txt")
    return path.read_text()


def test_each_changed_line_says_why(dumped: Path) -> None:
    functionalized = _stage(dumped, "functionalize").splitlines()
    assert any(line.startswith("- ") and "relu_(linear)" in line for line in functionalized)
    assert any(line.startswith("+ ") and "relu(linear)" in line for line in functionalized)
    placed = _stage(dumped, "place_casts").splitlines()
    new = [line for line in placed if line.startswith("+ ")]
    assert new
    assert all("# " in line or line.startswith("+ return ") for line in new)
    cast = next(line for line in new if "proj_weight_f16: f16[8, 8] = to(" in line)
    assert "[cast]" in cast


def test_source_lines_and_module_paths_survive(dumped: Path) -> None:
    plan = json.loads((dumped / "plan.json").read_text())
    nodes = {node["name"]: node for node in plan["nodes"]}
    assert nodes["linear_1"]["module"] == "blocks.1.proj"
    this = Path(__file__)
    line = 1 + next(
        i for i, text in enumerate(this.read_text().splitlines()) if "line of the softmax" in text
    )
    assert nodes["softmax"]["source"] == f"{this.name}:{line}"
    assert nodes["softmax"]["module"] == "blocks.0"


def test_the_plan_is_json_with_the_reason_of_every_node(dumped: Path) -> None:
    plan = json.loads((dumped / "plan.json").read_text())
    assert (plan["level"], plan["dtype"], plan["device"]) == ("O1", "float16", "cpu")
    assert all(node["reason"] and node["rule"] for node in plan["nodes"])
    assert plan["casts"] == sum(
        n["rule"] == "cast" and n["op"] == "aten::to" for n in plan["nodes"]
    )
    linear = next(n for n in plan["nodes"] if n["name"] == "linear")
    assert (linear["captured"], linear["planned"]) == ("f32[4, 8]", "f16[4, 8]")


def test_the_environment_variable_dumps_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPCOMPILE_DUMP", str(tmp_path))
    mpcompile(Net(), emit="eager")(torch.randn(4, 8))
    assert list(tmp_path.glob("graph_*/plan.json"))


def test_a_plan_prints_a_line_a_node() -> None:
    model = mpcompile(Net(), dtype=torch.float16, emit="eager")
    model(torch.randn(4, 8))
    (plan,) = compiled_plans(model)
    text = plan.full().splitlines()
    assert len(text) == 2 + len(plan.nodes)
    assert text[0].startswith("O1 float16 on cpu: ")
    assert any("softmax" in line and "FP32" in line and "exponentials" in line for line in text)


def test_a_plan_of_one_graph_in_short() -> None:
    """As the plan of a model: a verdict, the products, the others; no casts, no scaling."""
    model = mpcompile(Net(), dtype=torch.float16, emit="eager")
    model(torch.randn(4, 8))
    (plan,) = compiled_plans(model)
    verdict, blank, *rows, _, casts = str(plan).splitlines()
    assert verdict.startswith("O1 on cpu: 2 of 2 products in FP16, 100.0% of ")
    assert (blank, casts) == ("", f"Casts: {plan.casts}")
    kinds = [row.split()[:3] for row in rows if row]
    assert [kind[0] for kind in kinds] == ["products", "blocks.*.proj", "other", *["blocks.*"] * 2]
    assert {kind[1] for kind in kinds[1:] if kind[0] != "other"} == {"(2)"}  # alike layers
