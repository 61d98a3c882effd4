"""What torch's own trace gets: graphs, plans and the programs of optimizer steps."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from run_apart import ran


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
