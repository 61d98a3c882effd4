"""What is logged, and with which facts."""

import ast
import dataclasses
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from as_written import MakesState
from repository import ROOT
from run_apart import ran
from torch import nn

from mpcompile import LossScale, MPOptimizer, compiled_plans, logs, loss_scale_of, mpcompile
from mpcompile.errors import CannotRewrite, MPCompileWarning
from mpcompile.profile import store
from mpcompile.profile.calls import Point
from mpcompile.profile.measure import measure
from mpcompile.scaling import live_scale

DOCUMENT = ROOT / "docs" / "troubleshooting.md"
FP16 = torch.float16
Facts = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def facts(caplog: pytest.LogCaptureFixture) -> Facts:
    """The facts of the records of one topic, of every level."""
    caplog.set_level(logging.DEBUG, "mpcompile")

    def of(topic: str) -> list[dict[str, Any]]:
        records = [r for r in caplog.records if r.name == f"mpcompile.{topic}"]
        assert all(r.getMessage() for r in records)  # the text can be formatted
        return [r.mpcompile for r in records]  # type: ignore[attr-defined]

    return of


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Softmax(-1))


def without(found: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in names}


# -- graphs ----------------------------------------------------------------------------------------


def test_one_record_for_each_graph(facts: Facts) -> None:
    model = mpcompile(net(), dtype=FP16, emit="eager", loss_scale="none")
    model(torch.randn(8, 16))
    (graph,) = facts("compile")
    seconds = [graph.pop(k) for k in ("capture_seconds", "passes_seconds", "seconds")]
    assert graph == {
        "event": "graph", "level": "O1", "dtype": "float16", "device": "cpu", "scaled": False,
        "nodes": 2, "low": 1, "full": 1, "kept": 0,  # the linear is low, the softmax FP32
        "casts": 4,  # of the linear's three operands, and of its result
        "share": 1.0,  # all dims of the one product are multiples of eight
    }  # fmt: skip
    assert 0 < seconds[0] + seconds[1] < seconds[2]
    assert facts("fallback") == []


def test_each_pass_that_changed_the_graph(facts: Facts) -> None:
    model = mpcompile(net(), dtype=FP16, emit="eager")
    model(torch.randn(8, 16)).sum().backward()
    (plan,) = compiled_plans(model)
    assert "place_casts" in plan.changed
    passes = facts("passes")
    assert tuple(one["name"] for one in passes) == plan.changed
    assert {one["event"] for one in passes} == {"pass"}
    assert [one["seconds"] for one in passes] == [plan.seconds[name] for name in plan.changed]


def test_a_graph_left_in_fp32(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise CannotRewrite("it is a test")

    monkeypatch.setattr("mpcompile.compiler.plan_graph.capture", refuse)
    with pytest.warns(MPCompileWarning, match="left a graph in FP32"):
        mpcompile(net(), emit="eager")(torch.randn(8, 16))
    (left,) = facts("fallback")
    assert without(left, "seconds") == {"event": "left", "device": "cpu", "reason": "it is a test"}
    assert facts("compile") == []


# -- the loss scale --------------------------------------------------------------------------------


def optimizer_of(model: nn.Module, generated: bool) -> torch.optim.Optimizer:
    plain = torch.optim.SGD(model.parameters(), lr=1e-3)
    return MPOptimizer(plain, emit="eager") if generated else plain


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *factors: float) -> None:
    """One step for each factor, which the loss is multiplied by."""
    for factor in factors:
        (model(torch.randn(8, 16)).square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_moves_and_skipped_steps(facts: Facts, level: str, generated: bool) -> None:
    scale = LossScale.dynamic(2.0**10, growth_interval=2)
    model = mpcompile(net(), dtype=FP16, level=level, emit="eager", loss_scale=scale)
    train(model, optimizer_of(model, generated), 1.0, 1e12, 1.0, 1.0)
    assert facts("scale") == [
        {"event": "skipped", "scale": 2.0**10, "steps": 1},
        {"event": "moved", "before": 2.0**10, "after": 2.0**9},
        {"event": "first_skips", "steps": 1},
        {"event": "moved", "before": 2.0**9, "after": 2.0**10},  # after two good steps
    ]


def test_two_optimizers_of_one_scale_log_a_move_once(facts: Facts) -> None:
    scale = LossScale.dynamic(2.0**10)
    model = mpcompile(
        nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)), dtype=FP16, emit="eager",
        loss_scale=scale,
    )  # fmt: skip
    both = [optimizer_of(part, True) for part in model]
    (model(torch.randn(8, 16)).square().mean() * 1e12).backward()
    for optimizer in both:
        optimizer.step()
    moves = [one for one in facts("scale") if one["event"] == "moved"]
    assert moves == [{"event": "moved", "before": 2.0**10, "after": 2.0**9}]


def test_the_scale_that_the_first_backward_finds(facts: Facts) -> None:
    model = mpcompile(net(), dtype=FP16, emit="eager")
    train(model, optimizer_of(model, True), 1e6)
    found = loss_scale_of(model).value
    assert found < 2.0**16, "else it had found nothing new"
    assert facts("scale") == [{"event": "found", "scale": found}]


@pytest.mark.slow("trainings in processes of their own")
def test_a_start_that_no_search_finds(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "mpcompile.compiler.graph_function.replays", lambda *how: how[0] is not None
    )
    model = mpcompile(net(), dtype=FP16, mode="reduce-overhead")
    for batch in (8, 9):  # said once for two graphs
        model(torch.randn(batch, 16)).square().mean().backward()
    assert facts("scale") == [{"event": "unsearched", "start": 2.0**16}]
    other = mpcompile(net(), dtype=FP16, mode="reduce-overhead", loss_scale=LossScale.dynamic(8.0))
    other(torch.randn(8, 16)).square().mean().backward()
    assert len(facts("scale")) == 1, "this one was given its start"


def test_a_search_in_vain(facts: Facts) -> None:
    model = mpcompile(net(), dtype=FP16, emit="eager")
    model(torch.full((8, 16), torch.inf)).sum().backward()
    not_found, not_finite = facts("scale")
    assert not_finite["event"] == "not_finite"
    assert "look at the data" in not_finite["what"]
    assert not_found == {"event": "not_found"}


def test_a_loaded_scale_is_no_move(facts: Facts) -> None:
    scale = LossScale.dynamic(2.0**10)
    state = {**scale.state_dict(), "scale": 2.0**5, "skipped_steps": 3}
    scale.load_state_dict(state)
    assert scale.value == 2.0**5
    assert facts("scale") == []


class Arriving:
    """Numbers on their way from a device."""

    made = 0

    def __init__(self, *values: torch.Tensor) -> None:
        type(self).made += 1
        self.numbers, self.looks = tuple(value.item() for value in values), 0

    def read(self) -> tuple[float | int | bool, ...] | None:
        self.looks += 1
        return self.numbers if self.looks > 1 else None


def test_the_log_waits_for_no_device(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line comes once the numbers are there; without a listener they are asked for in every
    eighth step.
    """
    monkeypatch.setattr(live_scale, "AsyncRead", Arriving)
    monkeypatch.setattr(live_scale, "capabilities", lambda _: mock.Mock(asynchronous=True))
    monkeypatch.setattr(Arriving, "made", 0)
    live = LossScale.dynamic(2.0**10).live
    there = live.reside(torch.device("cpu"))
    there["scale"].fill_(2.0**9)
    there["skipped_steps"].fill_(1)
    with monkeypatch.context() as deaf:
        deaf.setattr(logging.getLogger("mpcompile.scale"), "isEnabledFor", lambda level: False)
        assert [live.stepped() for _ in range(7)] == [None] * 7
    assert Arriving.made == 0
    assert live.stepped() is None
    assert facts("scale") == []
    assert live.stepped() == (8, 1, 1, 2.0**10, False)
    assert [one["event"] for one in facts("scale")] == ["skipped", "moved"]
    assert live.stepped() is None  # asked at once: someone listens
    assert Arriving.made == 2


# -- optimizers and profiles -----------------------------------------------------------------------


def test_why_a_step_is_compiled(facts: Facts) -> None:
    model = mpcompile(net(), dtype=torch.bfloat16, emit="eager")
    optimizer = MPOptimizer(torch.optim.AdamW(model.parameters(), 1e-3), emit="eager")
    train(model, optimizer, 1.0, 1.0)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    train(model, optimizer, 1.0)
    model[0].bias.requires_grad_(False)  # the weight is of a kind that is known
    train(model, optimizer, 1.0)
    compiled = facts("optim")
    assert len(compiled) == optimizer.compilations == 2
    assert {(one["event"], one["optimizer"]) for one in compiled} == {("compiled", "AdamW")}
    assert [one["parameters"] for one in compiled] == [2, 2]
    assert [one["why"] for one in compiled] == [
        "none was compiled yet, or a state was loaded",
        "another value of weight_decay",
    ]
    steps = [one for one in facts("passes") if one["event"] == "step_pass"]
    assert {one["name"] for one in steps} == {"rewritten"}


def test_a_step_that_runs_by_operator(facts: Facts) -> None:
    model = mpcompile(net(), dtype=torch.bfloat16, emit="eager")
    train(model, MPOptimizer(MakesState(model.parameters(), 1e-3), emit="eager"), 1.0, 1.0)
    assert [one["event"] for one in facts("optim")] == ["by_operator", "compiled"]


@pytest.mark.parametrize("fits", [True, False])
def test_which_profile_is_used(
    facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    monkeypatch.delenv(store.VARIABLE, raising=False)
    monkeypatch.setattr(store.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(store, "_loaded", {})
    here = torch.device("cpu")
    empty = store.empty_profile(here)
    profile = dataclasses.replace(
        empty,
        driver=empty.driver if fits else "another",
        samples=store.builtin("cpu-avx2").samples[:3],
    )
    path = store.cache_path(here)
    store.write(profile, path)
    facts("profile").clear()
    store.load(here)
    mine = [one for one in facts("profile") if one["file"] == str(path)]
    assert [one["event"] for one in mine] == ["loaded" if fits else "misfit"]


def test_a_profile_that_was_measured(facts: Facts) -> None:
    found = measure(torch.device("cpu"), seconds=0.1, points=[Point("gemm", (1, 8, 8, 8))])
    measured = {"event": "measured", "device": found.device, "samples": len(found.samples)}
    assert facts("profile") == [measured]


# -- what users see --------------------------------------------------------------------------------


@pytest.mark.slow("trainings in processes of their own")
def test_nothing_is_printed_and_no_text_made_unasked() -> None:
    """In a process of its own: pytest listens to torch's trace, too."""
    failing = """
from mpcompile.capture import compile_log
def fail(*_, **__):
    raise SystemExit("a text was made")
compile_log.GraphPlan.to_dict = compile_log.ir.render = fail
"""
    assert ran(failing) == ""
    assert not any(logging.getLogger(f"mpcompile.{t}").handlers for t in logs.TOPICS)


@pytest.mark.slow("trainings in processes of their own")
def test_torch_logs_takes_our_name() -> None:
    printed = ran(TORCH_LOGS="mpcompile")
    assert "a graph at O2 in float16 on cpu" in printed
    assert "place_casts" not in printed
    assert "place_casts changed the graph" in ran(TORCH_LOGS="+mpcompile")


@pytest.mark.slow("trainings in processes of their own")
def test_the_documented_json() -> None:
    section = DOCUMENT.read_text().partition("## Logs and traces")[2]
    (formatter,) = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    lines = [json.loads(line) for line in ran(formatter, (1e12, 1.0)).splitlines()]
    assert {line["logger"] for line in lines} == {
        f"mpcompile.{t}" for t in ("compile", "optim", "scale")
    }
    by_event = {line["event"]: line for line in lines}
    assert by_event["first_skips"]["steps"] == 1
    moved = by_event["moved"]
    assert without(moved, "logger", "time") == {"event": "moved", "before": 1024.0, "after": 512.0}
    (example,) = re.findall(r'^{"logger": .*?}$', section, re.M | re.S)
    assert json.loads(example).keys() == moved.keys()


def test_every_event_is_documented() -> None:
    said = set()
    for path in (ROOT / "mpcompile").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "logs.event":
                topic, level, name = node.args[:3]
                assert isinstance(level, ast.Attribute)
                said.add((ast.literal_eval(topic), level.attr, ast.literal_eval(name)))
    rows = re.findall(r"^\| `mpcompile\.(\w+)` \| (\w+) \| (.*?) \|", DOCUMENT.read_text(), re.M)
    events = {(t, level, e) for t, level, names in rows for e in re.findall(r"`(\w+)`", names)}
    assert events == said
    assert {topic for topic, _, _ in events} == set(logs.TOPICS)
