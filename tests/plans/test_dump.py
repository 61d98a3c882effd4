"""Dumps: readable, complete, true. And what torch's own trace gets: graphs, plans, steps."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from module_of import module_of
from run_apart import ran
from torch import nn

from mpcompile import compiled_plans, mpcompile
from mpcompile.capture.pipeline import PASSES


def block() -> nn.Module:
    return module_of(
        lambda m, x: F.softmax(F.relu(m.proj(x), inplace=True), -1), proj=nn.Linear(8, 8)
    )


def net() -> nn.Module:
    return module_of(lambda m, x: m.blocks(x), blocks=nn.Sequential(block(), block()))


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    model = mpcompile(net(), dtype=torch.float16, emit="eager", dump=tmp_path, strict=True)
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
    mpcompile(net(), emit="eager")(torch.randn(4, 8))
    assert list(tmp_path.glob("graph_*/plan.json"))


# -- the trace ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trace."""
    folder = tmp_path_factory.mktemp("trace")
    ran(TORCH_TRACE=str(folder))
    return folder


def artifacts(trace: Path) -> dict[str, str]:
    """Our artifacts in the one file of a trace. Each is a line of JSON; its text is indented."""
    (log,) = trace.iterdir()
    found: dict[str, str] = {}
    name = None
    for line in log.read_text().splitlines():
        if line.startswith("\t"):
            if name is not None:
                found[name] += line[1:] + "\n"
            continue
        name = json.loads(line[line.index("{") :]).get("artifact", {}).get("name", "")
        name = name if name.startswith("mpcompile_") else None
        if name is not None:
            assert name not in found or name == "mpcompile_step"  # a kind of parameter has its own
            found.setdefault(name, "")
    return found


@pytest.mark.slow("plans of several models")
def test_the_trace_has_graphs_plans_and_steps(trace: Path) -> None:
    found = artifacts(trace)
    assert list(found) == [f"mpcompile_{n}" for n in ("captured", "rewritten", "plan", "step")]
    assert re.search(r"^linear: f32\[8, 32\] = linear\(", found["mpcompile_captured"], re.M)
    low = r"^linear: f16\[8, 32\] = linear\(.* # LOW: .* \[table\] \(0\)$"
    assert re.search(low, found["mpcompile_rewritten"], re.M)
    plan = json.loads(found["mpcompile_plan"])
    assert plan["level"] == "O2"
    assert [line["text"] for line in plan["before"]] == found["mpcompile_captured"].splitlines()
    assert found["mpcompile_step"].count("= copy_(param0, ") == 2  # the weight's and the bias's


@pytest.mark.slow("plans of several models")
def test_tlparse_shows_them(trace: Path, tmp_path: Path) -> None:
    program = shutil.which("tlparse", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("tlparse is not installed")
    (log,) = trace.iterdir()
    out = tmp_path / "report"
    subprocess.run(
        [program, str(log), "-o", str(out), "--no-browser"], check=True, capture_output=True
    )
    shown = {re.sub(r"_\d+\.", ".", path.name) for path in out.rglob("mpcompile_*")}
    texts = {f"mpcompile_{name}.txt" for name in ("captured", "rewritten", "step")}
    assert shown == {*texts, "mpcompile_plan.json"}
    index = (out / "index.html").read_text()
    assert all(name.removesuffix(".txt").removesuffix(".json") in index for name in shown)


@pytest.mark.slow("plans of several models")
def test_a_graph_left_in_fp32_has_its_reason_in_the_trace(tmp_path: Path) -> None:
    refusing = """
from mpcompile.compiler import plan_graph
from mpcompile.errors import CannotRewrite
def refuse(*_, **__):
    raise CannotRewrite("it is a test")
plan_graph.capture = refuse
"""
    ran(refusing, TORCH_TRACE=str(tmp_path))
    found = artifacts(tmp_path)
    assert "mpcompile_captured" not in found
    assert json.loads(found["mpcompile_plan"])["left"] == "it is a test"
