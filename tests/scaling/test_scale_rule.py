"""The rule that moves a loss scale: of numbers, next to a model of it; and its graph."""

import dataclasses
import inspect

import numpy as np
import torch
from hypothesis import given, settings
from scale_model import RULES, STARTS, STEPS, Model
from torch import fx

from mpcompile import LossScale, ir
from mpcompile.ir import aten
from mpcompile.ir.scale import INIT_SCALE, STATE_DTYPES, ScaleRule, ScaleState, settled, updated
from mpcompile.ir.step_config import SKIPPED, Slot, StepConfig
from mpcompile.optim.decide import graph_of_decision


def moving(rule: ScaleRule) -> tuple[fx.GraphModule, list[Slot]]:
    """A step that decides nothing but how one loss scale moves, and its inputs."""
    config = StepConfig((), (), scales=(rule,))
    inputs = {name: torch.zeros((), dtype=dtype) for name, dtype in STATE_DTYPES.items()}
    inputs = {"flag": torch.tensor(0), "first": torch.tensor(True), **inputs}
    like = {Slot("scale", 0, name): tensor for name, tensor in inputs.items()}
    gm = graph_of_decision(config, {**like, SKIPPED: torch.tensor(False)})
    return gm, [*map(ir.slot_of, gm.graph.find_nodes(op="placeholder"))]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(RULES, STARTS, STEPS)
def test_the_rule_moves_numbers_as_the_model_does(
    rule: ScaleRule, scale: float, steps: list[tuple[bool, bool]]
) -> None:
    state = once = ScaleState(scale, overflows_left=rule.hysteresis)
    model, plain = Model(rule, scale), Model(rule, scale)
    for overflow, first in steps:
        state = settled(rule, state, overflow, first)
        model.step(overflow, first)
        assert dataclasses.asdict(state) == model.numbers()
        once = updated(rule, once, overflow)
        plain.step(overflow)
        assert once.saved() == plain.saved()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(RULES, STARTS, STEPS)
def test_a_loss_scale_settles_as_the_model_does(
    rule: ScaleRule, start: float, steps: list[tuple[bool, bool]]
) -> None:
    """Once on the host, and once where a generated step keeps the numbers on a device."""
    host, device = LossScale(rule, start), LossScale(rule, start)
    device.live.reside(torch.device("cpu"))
    models = {host: Model(rule, start), device: Model(rule, start, np.float32)}
    for scale, model in models.items():
        scale.said.floor = scale.said.skips = scale.said.row = (
            True  # that it does is tested elsewhere
        )
        for i, (overflow, first) in enumerate(steps):
            first = first or i == 0
            if first:
                scale.saw_forward()
            scale.settle(overflow)
            model.step(overflow, first)
            if scale is host:
                assert scale.state.saved() == model.saved()
        assert scale.state.good_steps == model.good
        assert scale.skipped_steps == model.skipped


def test_every_constant_of_the_traced_rule_comes_from_the_dataclass() -> None:
    rule = ScaleRule("dynamic", 3.0, 0.125, 7, 5, 0.75, 99.0)
    graph = moving(rule)[0].graph
    constants = {a for n in graph.nodes for a in n.args if isinstance(a, (int, float))}
    assert constants == {3.0, 0.125, 7, 5, 0.75, 99.0, 0, 1}


def test_the_state_keeps_its_dtypes_in_the_graph() -> None:
    graph = moving(ScaleRule())[0].graph
    writes = [w for w in ir.writes(graph) if ir.slot_of(w[1]) != SKIPPED]
    assert {ir.slot_of(target).key for _, target, _ in writes} == set(STATE_DTYPES)
    for _, target, value in writes:
        assert ir.dtype(value) is ir.dtype(target) is STATE_DTYPES[ir.slot_of(target).key]
    assert not graph.find_nodes(op="call_function", target=aten._to_copy.default)


def test_a_static_scale_needs_nothing_but_its_count() -> None:
    slots = [str(slot) for slot in moving(ScaleRule("static"))[1]]
    assert slots == ["scale0_flag", "scale0_skipped_steps", "result_skipped"]


def test_the_defaults_are_those_of_the_dataclass() -> None:
    """As the documentation gives them: GradScaler's, with bounds, and no patience for overflows."""
    assert ScaleRule() == ScaleRule("dynamic", 2.0, 0.5, 2000, 1, 2.0**-14, 2.0**24)
    assert INIT_SCALE == 2.0**16
    assert LossScale.dynamic().rule == LossScale.grad_scaler().rule == ScaleRule()
    given = inspect.signature(LossScale.dynamic).parameters
    for field in dataclasses.fields(ScaleRule):
        if field.name != "kind":
            assert given[field.name].default == field.default
