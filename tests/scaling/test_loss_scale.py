"""A `LossScale` without a model: its settings, what is saved of it, and the rule that moves it: of
numbers, next to a model of it; and its graph.
"""

import dataclasses
import inspect
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scale_model import RULES, STARTS, STEPS, Model
from torch import fx

from mpcompile import LossScale, MPCompileError, ir
from mpcompile.ir import aten
from mpcompile.ir.scale import INIT_SCALE, STATE_DTYPES, ScaleRule, ScaleState, settled, updated
from mpcompile.ir.step_config import SKIPPED, Slot
from mpcompile.optim.decide import graph_of_decision
from mpcompile.optim.members import StepConfig
from mpcompile.scaling.overflows import _FLAGS, Count, Overflows


def after(scale: LossScale, overflows: list[bool]) -> ScaleState:
    state = scale.state
    for overflow in overflows:
        state = updated(scale.rule, state, overflow)
    return state


@pytest.mark.parametrize(
    "arguments",
    [
        {"init_scale": 0.0},
        {"init_scale": float("inf")},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"hysteresis": 0},
        {"min_scale": 4.0, "init_scale": 2.0},
    ],
)
def test_senseless_settings_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(MPCompileError, match=next(iter(arguments))):
        LossScale.dynamic(**arguments)  # type: ignore[arg-type]


def test_state_survives_state_dict_and_pickle() -> None:
    scale = LossScale.dynamic(init_scale=32.0, growth_interval=7, hysteresis=3)
    scale.state = after(scale, [False, True, False])
    other = LossScale.dynamic()
    other.load_state_dict(scale.state_dict())
    assert other.state_dict() == scale.state_dict()
    assert pickle.loads(pickle.dumps(scale)).state_dict() == scale.state_dict()


def test_reads_what_was_saved() -> None:
    saved = {
        "kind": "dynamic", "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 7,
        "hysteresis": 3, "min_scale": 0.5, "max_scale": 2.0**24, "scale": 8.0, "good_steps": 5,
        "overflows_left": 2, "skipped_steps": 4, "fitting": False,
    }  # fmt: skip
    scale = LossScale.dynamic()
    scale.load_state_dict(saved)
    assert scale.state_dict() == saved
    assert list(scale.state_dict()) == list(saved)
    assert after(scale, [True, True]).scale == 4.0  # with the two overflows that were left


def test_a_pickle_holds_what_version_0_3_reads() -> None:
    """Plain numbers, by the names that they had; nothing of this process."""
    scale = LossScale.dynamic(init_scale=8.0)
    scale.live.reside(torch.device("cpu"))
    scale.saw_forward()
    scale.settle(True)
    kept = scale.__getstate__()
    state = kept.pop("_state")
    assert dataclasses.asdict(state) == {
        "scale": 4.0, "good_steps": 0, "overflows_left": 1, "skipped_steps": 1, "hit": False,
        "floor": False,
    }  # fmt: skip
    assert kept == {
        **{k: v for k, v in scale.state_dict().items() if k not in state.saved()},
        "open": False, "fp16_only": False, "_warned": False, "_logged": False,
    }  # fmt: skip


def test_a_constant_may_be_set_while_training() -> None:
    scale = LossScale.dynamic(init_scale=8.0, growth_interval=100)
    scale.growth_interval, scale.growth_factor = 1, 4.0
    assert after(scale, [False]).scale == 32.0
    assert scale.state_dict()["growth_interval"] == 1


def test_reads_a_grad_scaler() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=11, enabled=True)
    theirs.scale(torch.ones(1))  # it makes its tensors lazily
    scale = LossScale.dynamic()
    scale.load_state_dict(theirs.state_dict())
    assert (scale.value, scale.growth_interval) == (512.0, 11)


def test_refuses_a_foreign_state() -> None:
    with pytest.raises(MPCompileError, match="neither"):
        LossScale.dynamic().load_state_dict({"lr": 1.0})


def test_an_overflow_is_counted_once_whatever_else_is_skipped_for_it() -> None:
    """A generated step moves the scale, another optimizer skips for the same overflow, and then the
    generated step of a third one: no forward in between, so the scale stays.
    """
    scale = LossScale.dynamic(init_scale=2.0**10)
    resident = scale.live.reside(torch.device("cpu"))
    resident["hit"].fill_(True)
    resident["floor"].fill_(True)
    scale.skip_for()
    assert scale.skipped_steps == 1
    assert bool(resident["hit"])
    assert bool(resident["floor"])
    scale.load_state_dict(LossScale.dynamic().state_dict())
    assert not bool(resident["hit"])
    assert not bool(resident["floor"])


# -- the rule --------------------------------------------------------------------------------------


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


# -- `Count`: how many backward passes overflowed between two moments -----------------------------


def counts(flags: list[int]) -> list[Count]:
    """The count before any pass, and after each."""
    found = [Count()]
    for flag in flags:
        found.append(found[-1].one_more(torch.tensor(flag)))
    return found


@pytest.mark.parametrize("length", [1, 3, _FLAGS, _FLAGS + 1, 3 * _FLAGS + 2])
def test_between_any_two_moments(length: int) -> None:
    flags = [int(i % 5 in (1, 2)) for i in range(length)]
    found = counts(flags)
    for start in range(0, length, 1 + length // 20):
        for end in range(start + 1, length + 1):
            new = found[end].since(found[start])
            assert int(new) == sum(flags[start:end])
            assert new.dtype is torch.int64


def test_where_no_backward_ran() -> None:
    before, after = counts([1])
    assert before.since(before) is after.since(after) is None


def test_it_keeps_few_flags_however_many_passes_there_were() -> None:
    last = counts([1] * (5 * _FLAGS))[-1]
    assert len(last.flags) <= _FLAGS
    assert last.passes == 5 * _FLAGS


def test_a_flag_is_copied_when_it_is_counted() -> None:
    """The memory of a CUDA graph's result is written to by its next run."""
    overflows = Overflows()
    leaf = overflows.leaf(torch.device("cpu"))
    leaf.grad = flag = torch.ones(())
    count = overflows.count()
    flag.zero_()
    assert leaf.grad is None
    assert int(count.since(Count()) or 0) == 1
