"""A plan written as JSON is the same plan when it is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plans import graph, node, plan
from small_calls import X, net

from mpcompile import MPCompileError, Policy, compiled_plans, mpcompile, plan_for
from mpcompile.devices.gpus import GPU
from mpcompile.planner.min_cut import NEVER, MinimumCut
from mpcompile.planner.partitioned import BackwardNode, Saved
from mpcompile.planner.tensor_core_report import TensorCoreReport
from mpcompile.plans import GraphPlan, Plan, PlanNode

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int64])
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
FEW = {"max_size": 2}


@st.composite
def graph_plans(draw: st.DrawFn) -> GraphPlan:
    text = st.none() | st.text()
    few = {kind: st.lists(strategy, **FEW).map(tuple) for kind, strategy in (
        ("nodes", st.from_type(PlanNode)), ("backward", st.from_type(BackwardNode)),
        ("saved", st.builds(Saved, dtype=DTYPES)),
    )}  # fmt: skip
    return draw(
        st.builds(
            GraphPlan, **few, seconds=st.dictionaries(st.text(), NUMBERS, **FEW), left=text,
            tensor_cores=st.from_type(TensorCoreReport), ends_with=text,
            dump_dir=st.none() | st.text("ab/", min_size=1).map(Path),
        )
    )  # fmt: skip


def plans() -> st.SearchStrategy[Plan]:
    graphs = st.lists(graph_plans(), **FEW).map(tuple)
    return st.builds(Plan, graphs=graphs, gpu=st.none() | st.from_type(GPU))


@pytest.mark.slow("plans of several models")
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans())
def test_any_plan_comes_back(made: Plan) -> None:
    assert Plan.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    assert Plan.from_dict(made.to_dict()) == made


def test_a_real_plan_comes_back(tmp_path: Path) -> None:
    made = plan_for(net(), X, device="t4", level="O2", policy=Policy(nodes={"gelu": "fp32"}))
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == made
    assert str(loaded) == str(made)
    assert loaded.nodes[0].reads == made.nodes[0].reads != ()


def test_a_dump_is_the_plan_of_a_graph(tmp_path: Path) -> None:
    model = mpcompile(net(), dtype=torch.float16, emit="eager", dump=tmp_path)
    model(X)
    (made,) = compiled_plans(model)
    (file,) = tmp_path.glob("*/plan.json")
    assert GraphPlan.from_dict(json.loads(file.read_text())) == made
    with pytest.raises(MPCompileError, match=r"plan of one graph: GraphPlan.from_dict\(\)"):
        Plan.load(file)


def test_keys_of_another_version() -> None:
    """Unknown ones are ignored, missing ones get their defaults."""
    cut = MinimumCut(("a", "b"), ({"time": 1}, {}), ({}, {}), ((0, 1, 2, NEVER),))
    made = plan(graph(node("a"), node("b"), cuts=(cut,)))
    assert Plan.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    data = made.to_dict()
    data["weather"] = data["graphs"][0]["nodes"][0]["weather"] = "fine"
    for name in ("reads", "frames"):
        del data["graphs"][0]["nodes"][0][name]
    del data["repairs"]
    assert Plan.from_dict(data) == made


def changed(path: str, value: Any = None) -> dict[str, Any]:
    """The data of a plan in which the key at `path` is missing, or has another value."""
    facts = {"versions": {"mpcompile": "9.0"}}
    data: Any = plan(graph(node("a"), dump_dir=Path("d")), **facts).to_dict()
    whole = data
    *way, last = path.split(".")
    for key in way:
        data = data[int(key)] if key.isdigit() else data[key]
    if value is None:
        del data[last]
    else:
        data[last] = value
    return dict(whole)


SAVED = {**vars(Saved("mm", "fc", (2,), torch.float16, 4, False)), "dtype": "float16"}
NO_PLAN = [
    (changed("graphs"), "the data of a Plan: Plan has no 'graphs'"),
    (changed("model"), r"\(it was written by mpcompile 9.0, and this is "),
    (changed("graphs.0.nodes.0.op"), r"Plan.graphs\[0\].nodes\[0\] has no 'op'"),
    (changed("level", 1), "Plan.level is 1, not of type str"),
    (changed("graphs.0.casts", "many"), r"Plan.graphs\[0\].casts is 'many', not of type int"),
    (changed("graphs.0.scaled", 1), r"scaled is 1, not of type bool"),
    (changed("graphs", {"a": 1}), r"Plan.graphs is \{'a': 1\}, not of type tuple"),
    (changed("graphs.0.nodes.0.frames", [1]), r"frames\[0\] is 1, not of type str"),
    (changed("versions", []), r"Plan.versions is \[\], not of type dict"),
    (changed("gpu", 7), "Plan.gpu is 7, not of type dict"),
    (changed("graphs.0.saved", [{**SAVED, "dtype": "f64"}]), "dtype is 'f64', not of type dtype"),
    ([], r"Plan is \[\], not of type dict"),
    (None, "Plan is None, not of type dict"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "message"), NO_PLAN)
def test_what_is_no_plan(data: Any, message: str) -> None:
    with pytest.raises(MPCompileError, match=message):
        Plan.from_dict(data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[1]", r"plan.json: this is not the data of a Plan: Plan is \[1\]"),
        (None, "can't be read: No such file"),
    ],
)
def test_files_that_are_no_plans(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MPCompileError, match=message):
        Plan.load(path)
