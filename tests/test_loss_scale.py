"""Loss scaling: the pure update, the skipped step, and training loops that never mention it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpcompile import LossScale, MPCompileError, MPCompileWarning, loss_scale_of, mpcompile
from mpcompile.state.loss_scale import ScaleState

FP16: dict[str, Any] = {"dtype": torch.float16, "strict": True}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


# -- the update, on plain numbers -------------------------------------------------------------


def after(scale: LossScale, overflows: list[bool]) -> ScaleState:
    state = scale.state
    for overflow in overflows:
        state = scale.update(state, overflow)
    return state


def test_doubles_after_an_interval_of_good_steps_and_not_before() -> None:
    scale = LossScale.dynamic(init_scale=8.0, growth_interval=3)
    assert after(scale, [False] * 2).scale == 8
    assert after(scale, [False] * 3).scale == 16
    assert after(scale, [False] * 6).scale == 32
    assert after(scale, [False, False, True, False, False]).scale == 4  # the count starts anew


def test_halves_on_overflow_down_to_the_floor_and_never_passes_the_ceiling() -> None:
    scale = LossScale.dynamic(init_scale=8.0, min_scale=2.0, max_scale=16.0, growth_interval=1)
    assert after(scale, [True]).scale == 4
    assert after(scale, [True] * 10).scale == 2
    assert after(scale, [True] * 10).skipped_steps == 10
    assert after(scale, [False] * 10).scale == 16


def test_hysteresis_waits_for_that_many_overflows() -> None:
    scale = LossScale.dynamic(init_scale=8.0, hysteresis=2)
    assert after(scale, [True]).scale == 8
    assert after(scale, [True, True]).scale == 4
    assert after(scale, [True, False, True]).scale == 4  # as Megatron counts: not in a row


def test_static_and_none_never_move() -> None:
    assert after(LossScale.static(128.0), [True, False] * 5).scale == 128
    assert after(LossScale.static(128.0), [True]).skipped_steps == 1
    assert not LossScale.none().active


def test_update_is_pure() -> None:
    scale = LossScale.dynamic()
    before = dataclasses.replace(scale.state)
    scale.update(scale.state, overflow=True)
    assert scale.state == before


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


# Of a dynamic scale at 8.0 that has counted and said things, as version 0.1 pickled it when a
# LossScale still held each constant of its rule by itself.
PICKLED = b"""ccopy_reg
_reconstructor
(cmpcompile.state.loss_scale
LossScale
c__builtin__
object
NtR(dVkind
Vdynamic
sVgrowth_factor
F4.0
sVbackoff_factor
F0.5
sVgrowth_interval
I7
sVhysteresis
I3
sVmin_scale
F0.5
sVmax_scale
F16777216.0
sVopen
I01
sVfp16_only
I00
sVfitting
I00
sV_warned
I00
sV_logged
I01
sV_state
ccopy_reg
_reconstructor
(cmpcompile.state.loss_scale
ScaleState
c__builtin__
object
NtR(dVscale
F8.0
sVgood_steps
I5
sVoverflows_left
I2
sVskipped_steps
I4
sbsb."""


def test_reads_what_an_earlier_version_pickled_and_saved() -> None:
    saved = {
        "kind": "dynamic", "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 7,
        "hysteresis": 3, "min_scale": 0.5, "max_scale": 2.0**24, "scale": 8.0, "good_steps": 5,
        "overflows_left": 2, "skipped_steps": 4, "fitting": False,
    }  # fmt: skip
    old = pickle.loads(PICKLED)
    loaded = LossScale.dynamic()
    loaded.load_state_dict(saved)
    for scale in (old, loaded):
        assert scale.state_dict() == saved
        assert list(scale.state_dict()) == list(saved)
        assert after(scale, [True, True]).scale == 4.0  # with the two overflows that were left
    assert (old.open, old.fp16_only, old._logged, old._warned) == (True, False, True, False)


def test_a_pickle_holds_what_earlier_versions_read() -> None:
    """Plain numbers, by the names that they had; nothing of this process."""
    scale = LossScale.dynamic(init_scale=8.0)
    scale.reside(torch.device("cpu"))
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
        "open": False, "fp16_only": False, "_warned": False, "_logged": True,
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


# -- training loops ---------------------------------------------------------------------------


OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda p: torch.optim.AdamW(p, lr=0.1),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
]


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize("emit", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_overflow_step_changes_nothing_and_is_counted(
    make: Callable[..., torch.optim.Optimizer], emit: str
) -> None:
    model = mpcompile(mlp(), emit=emit, **FP16)
    optimizer = make(model.parameters())
    x = torch.randn(4, 8)

    def step(data: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    step(x)
    before, value = snapshot(model, optimizer), loss_scale_of(model).value
    step(x * 1e6)  # 8e6 has no FP16 value: inf in the first layer, nan gradients
    torch.testing.assert_close(snapshot(model, optimizer), before, rtol=0, atol=0, equal_nan=True)
    scale = loss_scale_of(model)
    assert (scale.skipped_steps, scale.value) == (1, value / 2)
    assert all(p.grad is not None for p in model.parameters())  # still there to be looked at
    step(x)
    assert not torch.equal(model[0].weight, before["model"]["0.weight"])
    assert scale.skipped_steps == 1


def test_gradients_are_true_to_size_whatever_the_scale() -> None:
    x = torch.randn(4, 8)
    gradients = []
    for scale in (1.0, 1024.0):
        model = mpcompile(mlp(), emit="eager", loss_scale=scale, **FP16)
        model(x).square().mean().backward()
        gradients.append(model[0].weight.grad)
    torch.testing.assert_close(*gradients, rtol=2e-3, atol=1e-6)


def test_small_gradients_survive_only_with_scaling() -> None:
    """A loss of 1e-7: its gradients are below 2**-24, FP16's smallest number."""
    x = torch.randn(4, 8)

    def gradient(loss_scale: LossScale | str) -> torch.Tensor:
        model = mpcompile(mlp(), emit="eager", loss_scale=loss_scale, **FP16)
        (model(x).sum() * 1e-9).backward()
        assert model[0].weight.grad is not None
        return model[0].weight.grad

    reference = mlp()
    (reference(x).sum() * 1e-9).backward()
    assert reference[0].weight.grad is not None
    assert gradient("none").count_nonzero() == 0
    torch.testing.assert_close(gradient("dynamic"), reference[0].weight.grad, rtol=1e-2, atol=1e-11)


def test_accumulation_and_clipping_need_no_scaler() -> None:
    reference, model = mlp(), mpcompile(mlp(), emit="eager", **FP16)
    batches = [torch.randn(4, 8) for _ in range(4)]
    for network in (reference, model):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for x in batches:
            (network(x).square().mean() / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.1)
        optimizer.step()
    torch.testing.assert_close(model[0].weight, reference[0].weight, rtol=1e-3, atol=1e-4)
    assert loss_scale_of(model).skipped_steps == 0


def test_clipping_by_value_cannot_hide_an_overflow() -> None:
    """`clip_grad_value_` turns inf into a number: only the graph's own flag still knows."""
    model = mpcompile(mlp(), emit="aot_eager", loss_scale="grad_scaler", **FP16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    loss = (model(torch.ones(4, 8)) * 1e6).sum()  # a gradient of 1e6 * 2**16: overflows in FP16
    loss.backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.nan_to_num_(0.0, 1.0, -1.0)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert loss_scale_of(model).skipped_steps == 1


def test_a_closure_is_checked_after_it_ran() -> None:
    model = mpcompile(mlp(), emit="eager", **FP16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8)

    def closure(data: torch.Tensor = x) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        return loss

    before = copy.deepcopy(model.state_dict())
    optimizer.step(lambda: closure(x * 1e6))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert loss_scale_of(model).skipped_steps == 1
    assert torch.isfinite(optimizer.step(closure))  # type: ignore[arg-type]
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_two_optimizers_over_one_model_move_its_scale_once() -> None:
    model = mpcompile(mlp(), emit="eager", **FP16)
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    before = copy.deepcopy(model.state_dict())
    model(torch.full((4, 8), 1e6)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert loss_scale_of(model).value == 2.0**15


def test_an_overflow_is_counted_once_whatever_else_is_skipped_for_it() -> None:
    """A generated step moves the scale, another optimizer skips for the same overflow, and then the
    generated step of a third one: no forward in between, so the scale stays.
    """
    scale = LossScale.dynamic(init_scale=2.0**10)
    resident = scale.reside(torch.device("cpu"))
    resident["hit"].fill_(True)
    resident["floor"].fill_(True)
    scale.skip_for()
    assert scale.skipped_steps == 1
    assert bool(resident["hit"])
    assert bool(resident["floor"])
    scale.load_state_dict(LossScale.dynamic().state_dict())
    assert not bool(resident["hit"])
    assert not bool(resident["floor"])


def test_a_gan_has_a_scale_for_each_network() -> None:
    """Two losses, two optimizers, one loop of plain PyTorch; one network overflows, once."""
    torch.manual_seed(0)
    generator = mpcompile(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)),
                          emit="eager", **FP16)  # fmt: skip
    critic = mpcompile(nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 1)),
                       emit="eager", **FP16)  # fmt: skip
    opt_g = torch.optim.Adam(generator.parameters())
    opt_c = torch.optim.Adam(critic.parameters())
    real, ones, zeros = torch.randn(16, 8), torch.ones(16, 1), torch.zeros(16, 1)
    bce = F.binary_cross_entropy_with_logits
    for i in range(5):
        fake = generator(torch.randn(16, 4))
        opt_c.zero_grad()
        data = real * (1e6 if i == 2 else 1)
        (bce(critic(data), ones) + bce(critic(fake.detach()), zeros)).backward()
        opt_c.step()
        opt_g.zero_grad()
        bce(critic(fake), ones).backward()
        opt_g.step()
    assert loss_scale_of(generator) is not loss_scale_of(critic)
    assert loss_scale_of(critic).skipped_steps == 1
    assert loss_scale_of(generator).skipped_steps == 0
    assert loss_scale_of(generator).value == 2.0**16
    assert all(torch.isfinite(p).all() for p in (*generator.parameters(), *critic.parameters()))


def test_a_hopeless_overflow_warns_once_at_the_floor() -> None:
    scale = LossScale.dynamic(init_scale=4.0, min_scale=2.0)
    model = mpcompile(mlp(), emit="eager", loss_scale=scale, **FP16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.full((4, 8), 1e6)).sum().backward()
            optimizer.step()
    ours = [w for w in caught if issubclass(w.category, MPCompileWarning)]
    assert len(ours) == 1
    assert "floor" in str(ours[0].message)
    assert scale.value == 2.0


def test_bf16_has_no_scale_unless_one_is_handed_over() -> None:
    for scale, skipped in (("dynamic", 0), (LossScale.static(8.0), 1)):
        model = mpcompile(mlp(), dtype=torch.bfloat16, emit="eager", loss_scale=scale)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (model(torch.ones(4, 8)) * float("inf")).sum().backward()
        optimizer.step()
        assert loss_scale_of(model).skipped_steps == skipped


def test_a_new_scale_does_not_recompile() -> None:
    model = mpcompile(mlp(), emit="eager", **FP16)
    scale = loss_scale_of(model)
    x = torch.randn(4, 8)
    for value in (2.0**16, 2.0**10, 3.0):
        scale.state = dataclasses.replace(scale.state, scale=value)
        with torch.compiler.set_stance("default" if value == 2.0**16 else "fail_on_recompile"):
            model.zero_grad()
            model(x).sum().backward()
