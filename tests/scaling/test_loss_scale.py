"""A `LossScale` without a model: its update on plain numbers, its settings, what is saved of it."""

import dataclasses
import pickle

import pytest
import torch

from mpcompile import LossScale, MPCompileError
from mpcompile.ir.scale import ScaleState, updated


def after(scale: LossScale, overflows: list[bool]) -> ScaleState:
    state = scale.state
    for overflow in overflows:
        state = updated(scale.rule, state, overflow)
    return state


def test_static_and_none_never_move() -> None:
    assert after(LossScale.static(128.0), [True, False] * 5).scale == 128
    assert after(LossScale.static(128.0), [True]).skipped_steps == 1
    assert not LossScale.none().active


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
