"""Steps skipped one after the other: it is said, or what overflows is pinned by repair=True."""

import logging
import math
from typing import Any

import pytest
import torch
from faulty_models import (
    Activation,
    Make,
    Own,
    Square,
    Steep,
    Steepest,
    Training,
    adamw,
    compiled,
    line_of,
    net,
    sgd,
)
from module_of import module_of
from ranks import on_each_rank
from torch import nn

from mpcompile import LossScale, compiled_plans, explain, loss_scale_of, mpcompile
from mpcompile.planner import target
from mpcompile.scaling import guard

PARTS = [Activation, Square, Steep]
HOW = [("O1", False), ("O1", True), ("O2", False), ("O2", True)]  # level, whether MPOptimizer


# -- said ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "generated"), HOW)
def test_four_in_a_row_are_said_once(level: str, generated: bool) -> None:
    model = compiled(Activation, level=level)
    (warning,) = Training(model, generated=generated).run(20).warnings
    assert warning.startswith("4 optimizer steps in a row were skipped")
    assert "mpcompile.diagnose(model, inputs, loss_fn=...)" in warning
    assert not loss_scale_of(model).repairs.events
    assert len(compiled_plans(model)) == 1


@pytest.mark.sweep("a matrix under Inductor")
@pytest.mark.parametrize("part", [Activation, Steep])
@pytest.mark.parametrize(("level", "generated"), [("O1", False), ("O2", True)])
def test_it_is_repaired_under_inductor(part: type[Activation], level: str, generated: bool) -> None:
    model = compiled(part, level=level, emit="inductor", checkpointed=True, repair=True)
    run = Training(model, generated=generated, emit="inductor").run(16)
    (event,) = loss_scale_of(model).repairs.events
    assert f"part ({line_of(part)})" in event
    assert loss_scale_of(model).skipped_steps < 16
    assert math.isfinite(run.losses[-1])


def test_what_no_precision_helps_against_is_said_and_left_alone() -> None:
    model = compiled(Own, repair=True)
    (warning,) = Training(model).run(20).warnings
    assert "steps in a row were skipped" in warning
    assert not loss_scale_of(model).repairs.events
    assert len(compiled_plans(model)) == 1


def test_a_scale_on_its_way_down_is_left_alone() -> None:
    """The gradients of `Steep` fit FP16 at a small scale, which the rule finds by itself."""
    model = compiled(Steep, loss_scale="grad_scaler", repair=True)
    Training(model).run(30)
    assert 4 < loss_scale_of(model).skipped_steps < 20
    assert not loss_scale_of(model).repairs.events


@pytest.mark.parametrize("start", [2.0**16, None])
def test_what_fits_at_no_scale_is_repaired(start: float | None) -> None:
    """Without a start, the first backward searches for one, in vain."""
    model = compiled(Steepest, loss_scale=LossScale.dynamic(start), repair=True)
    Training(model).run(12)
    assert loss_scale_of(model).skipped_steps == 5
    assert "part (" in loss_scale_of(model).repairs.events[0]


# -- repaired --------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("level", "generated"), HOW)
def test_a_repaired_model_trains_as_in_fp32(
    part: type[Activation], level: str, generated: bool
) -> None:
    _trains_as_in_fp32(part, sgd, level=level, generated=generated)


def test_and_with_adam() -> None:
    _trains_as_in_fp32(Activation, adamw, level="O1", generated=False)


def _trains_as_in_fp32(part: type[Activation], make: Make, *, level: str, generated: bool) -> None:
    model = compiled(part, level=level, repair=True)
    mixed = Training(model, make=make, generated=generated).run(50)
    skipped = loss_scale_of(model).skipped_steps
    assert skipped == 5
    plain = Training(net(part), make=make).run(50, idle=skipped)
    late = slice(-8, None)
    torch.testing.assert_close(mixed.losses[late], plain.losses[late], rtol=0.03, atol=0.003)
    assert plain.losses[-1] < 0.8 * plain.losses[0]  # it does train
    assert loss_scale_of(model).value == 128.0
    assert mixed.warnings == []


@pytest.mark.parametrize("how", ["function", "backend", "whole step", "graph breaks"])
def test_however_torch_compile_was_called(how: str) -> None:
    scale = LossScale.static(128.0)
    options: dict[str, Any] = {"dtype": torch.float16, "emit": "eager", "strict": True,
                               "repair": True, "loss_scale": scale}  # fmt: skip
    model = net(Activation, broken=how == "graph breaks")
    if how == "whole step":
        _train_in_one_function(model, options)
    else:
        call: Any = {
            "function": lambda: mpcompile(lambda x: model(x), **options),
            "backend": lambda: torch.compile(model, backend="mpcompile", options=options),
            "graph breaks": lambda: mpcompile(model, **options),
        }[how]()
        Training(model, call).run(20)
    (event,) = scale.repairs.events
    assert f"part ({line_of(Activation)})" in event
    assert scale.skipped_steps == 5


def _train_in_one_function(model: nn.Module, options: dict[str, Any]) -> None:
    optimizer = sgd(model.parameters())

    @mpcompile(**options)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    counters = torch._dynamo.utils.counters["stats"]
    for _ in range(4):
        loss = step(torch.randn(8, 16))
    graphs = counters["unique_graphs"]
    for _ in range(16):
        loss = step(torch.randn(8, 16))
    assert bool(loss.isfinite())
    # The repaired forward, which ran once, and the whole step.
    assert counters["unique_graphs"] == graphs + 2
    assert step.left is None


def test_the_plan_and_the_log_say_what_was_repaired(caplog: pytest.LogCaptureFixture) -> None:
    model = compiled(Square, repair=True)
    with caplog.at_level(logging.WARNING, logger="mpcompile.repair"):
        Training(model).run(10)
    (event,) = loss_scale_of(model).repairs.events
    assert event.startswith(f"part ({line_of(Square)})")
    (record,) = [r for r in caplog.records if r.name == "mpcompile.repair"]
    assert event in record.getMessage()
    before, after = compiled_plans(model)
    pinned = {n.name: n.reason for n in after.nodes if "repair=True" in n.reason}
    assert not any("repair=True" in n.reason for n in before.nodes)
    square = next(n for n in after.nodes if n.source == line_of(Square))
    assert square.precision == "FULL"
    assert pinned[square.name].startswith("pinned by repair=True: its result, up to ")


def test_explain_shows_the_repair() -> None:
    model = compiled(Square, repair=True)
    Training(model).run(10)
    plan = explain(model, torch.randn(8, 16))
    assert plan.repairs == tuple(loss_scale_of(model).repairs.events)
    assert len(plan.repairs) == 1
    (square,) = (n for n in plan.nodes if n.source == line_of(Square) and not n.is_added)
    assert square.precision == "FULL"
    assert "pinned by repair=True" in square.reason
    assert f"repaired: {plan.repairs[0]}" in str(plan)
    assert explain(net(Square), torch.randn(8, 16)).repairs == ()


def test_a_pin_holds_for_other_sizes() -> None:
    """Dynamo traces once more, with symbolic sizes; operators are found again by their place."""
    model = compiled(Activation, repair=True)
    Training(model, sizes=(32,) * 8 + (24, 16, 12, 8)).run(12)
    assert loss_scale_of(model).skipped_steps == 5
    assert len(loss_scale_of(model).repairs.events) == 1
    assert len(compiled_plans(model)) == 3
    symbolic = compiled_plans(model)[-1]
    assert any("f32[s" in n.captured for n in symbolic.nodes if n.source == line_of(Activation))


@pytest.mark.filterwarnings("ignore:4 optimizer steps in a row")
def test_a_model_beside_it_keeps_its_scale() -> None:
    """Its own scale is too high at the same time, and it stands after a layer that isn't compiled:
    what the repaired model made has not come into it.
    """
    training = Training(compiled(Activation, repair=True))
    other = mpcompile(nn.Linear(16, 4), dtype=torch.float16, emit="eager", loss_scale="grad_scaler")
    before, x = nn.Linear(16, 16), torch.randn(32, 16)
    optimizer = sgd([*before.parameters(), *other.parameters()])
    scales = [loss_scale_of(other).value]
    for _ in range(8):
        training.run(1)
        optimizer.zero_grad()
        (other(before(x)) * 1e3).sum().backward()  # fits from a scale of 64 on, 10 halvings away
        optimizer.step()
        scales.append(loss_scale_of(other).value)
    assert len(loss_scale_of(training.model).repairs.events) == 1
    assert scales == [2.0**16 / 2**i for i in range(9)]


def test_repairs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "MOST", 1)

    def forward(m: Any, x: torch.Tensor) -> Any:
        """The second part is only reached once the first is repaired."""
        return m.last(m.b(m.a(x)))

    torch.manual_seed(0)
    model = mpcompile(
        module_of(forward, a=Activation(), b=Steep(), last=nn.Linear(16, 4)),
        dtype=torch.float16, emit="eager", strict=True, loss_scale=128.0, repair=True,
    )  # fmt: skip
    (warning,) = Training(model).run(20).warnings
    assert "steps in a row were skipped" in warning
    assert len(loss_scale_of(model).repairs.events) == 1


def test_processes_of_a_group_repair_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "decide_alike", lambda: True)
    model = compiled(Activation, repair=True)
    (warning,) = Training(model).run(20).warnings
    assert "steps in a row were skipped" in warning
    assert not loss_scale_of(model).repairs.events


def _count_processes(rank: int) -> None:
    assert guard.decide_alike()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_processes_are_those_of_the_group() -> None:
    assert not guard.decide_alike()
    on_each_rank(_count_processes)
