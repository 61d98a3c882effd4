"""Checkpoints of an MPOptimizer: to and from plain PyTorch, copies, and runs taken up again."""

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import StepLR
from twins import Twins

from mpcompile import LossScale, MPCompileError, MPOptimizer, loss_scale_of, mpcompile

OPTIMIZERS: list[Callable[..., Optimizer]] = [
    functools.partial(SGD, lr=0.1),
    functools.partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    functools.partial(AdamW, lr=0.1, amsgrad=True),
    functools.partial(RMSprop, lr=0.1, centered=True),
]
OPTIMIZER = pytest.mark.parametrize("make", OPTIMIZERS, ids=["SGD", "momentum", "AdamW", "RMSprop"])
HUGE = torch.full((4, 8), 1e6)


def saved(state: Any) -> Any:
    """Through a file and back, as checkpoints go; nothing but tensors and plain values is in it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def fp16(model: nn.Sequential | None = None, **options: Any) -> nn.Sequential:
    model = model if model is not None else mlp()
    options = {"loss_scale": "grad_scaler", **options}  # it starts at 2**16, whatever the model
    return mpcompile(model, dtype=torch.float16, emit="eager", strict=True, **options)


def train(model: nn.Module, optimizer: Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


# -- the state --------------------------------------------------------------------------------


@OPTIMIZER
def test_the_state_dict_is_the_plain_optimizers(make: Any) -> None:
    twins = Twins(make)
    for steps in range(2):
        mine, theirs = twins.optimizer.state_dict(), twins.reference.state_dict()
        assert [scale["kind"] for scale in mine.pop("loss_scale")] == ["static"], steps
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        assert _types(mine) == _types(theirs)
        twins.step()


def _types(state: dict[str, Any]) -> dict[Any, Any]:
    return {
        index: {k: (type(v), getattr(v, "device", None)) for k, v in entries.items()}
        for index, entries in state["state"].items()
    }


@OPTIMIZER
@pytest.mark.parametrize("ours", [True, False])
def test_a_state_loads_into_the_other_kind(make: Any, ours: bool) -> None:
    """Ours into plain PyTorch's, and back."""
    twins = Twins(make)
    for _ in range(3):
        twins.step()
    if ours:
        twins.reference = make(twins.theirs)
        twins.reference.load_state_dict(saved(twins.optimizer.state_dict()))
    else:
        twins.optimizer.load_state_dict(saved(twins.reference.state_dict()))
    twins.train()


@OPTIMIZER
@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
def test_a_run_taken_up_again_is_the_same_bit_for_bit(make: Any, how: str) -> None:
    gradients = [[torch.randn(s) for s in [(3, 4), ()]] for _ in range(8)]
    gradients[5][0][0, 0] = float("inf")

    def run(params: list[nn.Parameter], optimizer: Optimizer, steps: slice) -> None:
        for given in gradients[steps]:
            for p, g in zip(params, given, strict=True):
                p.grad = g.clone()
            optimizer.step()

    params = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(()))]
    optimizer = MPOptimizer(make(params), emit="aot_eager")
    run(params, optimizer, slice(0, 4))
    if how == "state_dict":
        params2 = [nn.Parameter(p.detach().clone()) for p in params]
        optimizer2 = MPOptimizer(make(params2), emit="aot_eager")
        optimizer2.load_state_dict(saved(optimizer.state_dict()))
    elif how == "pickle":
        params2, optimizer2 = pickle.loads(pickle.dumps((params, optimizer)))
    else:
        params2, optimizer2 = copy.deepcopy((params, optimizer))
    run(params, optimizer, slice(4, 8))
    untouched = [p.detach().clone() for p in params]
    run(params2, optimizer2, slice(4, 8))
    torch.testing.assert_close(params2, params, rtol=0, atol=0)
    torch.testing.assert_close(params, untouched, rtol=0, atol=0, check_stride=False)
    assert optimizer2.skipped_steps == optimizer.skipped_steps == 1
    mine, theirs = optimizer2.state_dict(), optimizer.state_dict()
    torch.testing.assert_close(mine["state"], theirs["state"], rtol=0, atol=0)


# -- copies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_model_and_optimizer_trains_by_itself(copied: Callable[[Any], Any]) -> None:
    """With a scheduler at work, which replaces `step` on the object it was made for."""
    model = fp16()
    optimizer = MPOptimizer(Adam(model.parameters(), lr=0.1), emit="eager", max_grad_norm=1.0)
    scheduler = StepLR(optimizer, 1, 0.5)
    x = torch.randn(4, 8)
    train(model, optimizer, x)
    scheduler.step()
    model2, optimizer2 = copied((model, optimizer))
    assert optimizer2.param_groups[0]["lr"] == 0.05
    fp16(model2)
    train(model, optimizer, x)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    train(model2, optimizer2, x)
    torch.testing.assert_close(model2.state_dict(), before, rtol=1e-5, atol=1e-6)
    train(model2, optimizer2, x)
    train(model2, optimizer2, HUGE)
    assert optimizer2.skipped
    assert not optimizer.skipped
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not torch.equal(model2[0].weight, before["0.weight"])


# -- the loss scale ---------------------------------------------------------------------------


def trained() -> tuple[nn.Sequential, MPOptimizer]:
    """Scale 2**15, two good steps in a row, one skipped."""
    model = fp16()
    optimizer = MPOptimizer(SGD(model.parameters(), lr=0.1), emit="eager")
    for x in (torch.randn(4, 8), HUGE, torch.randn(4, 8), torch.randn(4, 8)):
        train(model, optimizer, x)
    return model, optimizer


def test_the_loss_scale_is_part_of_the_state() -> None:
    model, optimizer = trained()
    (entry,) = saved(optimizer.state_dict())["loss_scale"]
    assert entry == {**loss_scale_of(model).state_dict(), "parameters": [0, 1, 2, 3]}
    wanted = {"scale": 2.0**15, "good_steps": 2, "skipped_steps": 1, "kind": "dynamic"}
    assert entry | wanted == entry


@pytest.mark.parametrize("run_before", [True, False])
def test_a_loss_scale_goes_on_where_it_was(run_before: bool) -> None:
    """Checkpoints are mostly loaded before the first forward, when no scale is known yet."""
    _, optimizer = trained()
    state = saved(optimizer.state_dict())
    model = fp16()
    resumed = MPOptimizer(SGD(model.parameters(), lr=0.1), emit="eager")
    if run_before:
        train(model, resumed, torch.randn(4, 8))
    resumed.load_state_dict(state)
    assert resumed.state_dict()["loss_scale"] == state["loss_scale"]
    model(torch.randn(4, 8)).square().mean().backward()
    scale = loss_scale_of(model)
    assert scale.used == 2.0**15
    resumed.step()
    assert (scale.value, scale.state.good_steps, scale.skipped_steps) == (2.0**15, 3, 1)
    train(model, resumed, HUGE)
    assert (scale.value, scale.skipped_steps) == (2.0**14, 2)


def test_scales_of_two_models_find_their_models() -> None:
    def pair() -> tuple[list[nn.Sequential], MPOptimizer]:
        models = [fp16(), fp16()]
        params = [p for m in models for p in m.parameters()]
        return models, MPOptimizer(SGD(params, lr=0.1), emit="eager")

    def step(models: list[nn.Sequential], optimizer: MPOptimizer, *inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        sum(m(x).square().mean() for m, x in zip(models, inputs, strict=True)).backward()  # type: ignore[union-attr]
        optimizer.step()

    models, optimizer = pair()
    x = torch.randn(4, 8)
    for inputs in ((x, x), (HUGE, x), (x, x)):
        step(models, optimizer, *inputs)
    models2, resumed = pair()
    resumed.load_state_dict(saved(optimizer.state_dict()))
    step(models2, resumed, x, x)
    assert [loss_scale_of(m).value for m in models2] == [2.0**15, 2.0**16]
    assert [loss_scale_of(m).state.good_steps for m in models2] == [2, 4]


def towers() -> tuple[list[Any], MPOptimizer]:
    """Two models over one layer, each with another of its own."""
    torch.manual_seed(0)
    trunk = nn.Linear(8, 16)
    models = [
        mpcompile(
            nn.Sequential(trunk, nn.Linear(16, 4)),
            dtype=torch.float16, emit="eager", loss_scale="grad_scaler",
        )
        for _ in range(2)
    ]  # fmt: skip
    params = list(dict.fromkeys(p for m in models for p in m.parameters()))
    return models, MPOptimizer(SGD(params, lr=0.1), emit="eager")


def test_a_scale_goes_to_no_other_model_that_shares_a_parameter() -> None:
    """One model ran before the checkpoint, the other runs first after it."""
    models, optimizer = towers()
    train(models[1], optimizer, HUGE)
    fresh, resumed = towers()
    resumed.load_state_dict(saved(optimizer.state_dict()))
    for k in (0, 1):
        train(fresh[k], resumed, torch.randn(4, 8))
    assert [loss_scale_of(m).skipped_steps for m in fresh] == [0, 1]


def test_a_scale_in_use_is_not_set_back_by_a_model_that_runs_later() -> None:
    """Two models of one scale, an optimizer each; both optimizers have it in their checkpoint."""

    def pair() -> tuple[list[Any], list[MPOptimizer], LossScale]:
        scale = LossScale.grad_scaler()
        models = [
            mpcompile(nn.Linear(8, 4), dtype=torch.float16, emit="eager", loss_scale=scale)
            for _ in range(2)
        ]
        steps = [MPOptimizer(SGD(m.parameters(), lr=0.1), emit="eager") for m in models]
        return models, steps, scale

    models, steps, _ = pair()
    for model, optimizer in zip(models, steps, strict=True):
        train(model, optimizer, torch.randn(4, 8))
    fresh, resumed, scale = pair()
    for mine, theirs in zip(resumed, steps, strict=True):
        mine.load_state_dict(saved(theirs.state_dict()))
    for wanted, k in ((3, 0), (4, 0), (5, 1)):
        train(fresh[k], resumed[k], torch.randn(4, 8))
        assert scale.state.good_steps == wanted


def test_a_scale_loaded_by_itself_stays() -> None:
    model, optimizer = trained()
    state = saved(optimizer.state_dict())
    fresh = fp16()
    resumed = MPOptimizer(SGD(fresh.parameters(), lr=0.1), emit="eager")
    loss_scale_of(fresh).load_state_dict(LossScale.dynamic(64.0).state_dict())
    resumed.load_state_dict(state)
    train(fresh, resumed, torch.randn(4, 8))
    assert loss_scale_of(fresh).value == 64.0
    resumed.load_state_dict(state)  # later, back to the checkpoint: the scale goes back as well
    assert loss_scale_of(fresh).value == loss_scale_of(model).value


def test_a_grad_scalers_state_is_read() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=11)
    scaler.scale(torch.ones(1))
    model = fp16()
    plain = SGD(model.parameters(), lr=0.1)
    optimizer = MPOptimizer(SGD(model.parameters(), lr=0.1), emit="eager")
    optimizer.load_state_dict({**plain.state_dict(), "loss_scale": scaler.state_dict()})
    train(model, optimizer, torch.randn(4, 8))
    scale = loss_scale_of(model)
    assert (scale.value, scale.growth_interval, scale.state.good_steps) == (512.0, 11, 1)


def test_more_scales_than_models_are_refused() -> None:
    model, optimizer = trained()
    state, lr = optimizer.state_dict(), optimizer.param_groups[0]["lr"]
    state["loss_scale"] *= 2
    state["param_groups"][0]["lr"] = 7 * lr
    with pytest.raises(MPCompileError, match="2 loss scales were saved, 1 are known here"):
        optimizer.load_state_dict(state)
    assert loss_scale_of(model).value == 2.0**15
    assert optimizer.param_groups[0]["lr"] == lr


def test_a_scale_set_by_hand_is_used() -> None:
    model, optimizer = trained()
    loss_scale_of(model).load_state_dict(LossScale.dynamic(64.0, growth_interval=1).state_dict())
    train(model, optimizer, torch.randn(4, 8))
    assert loss_scale_of(model).used == 64.0
    assert loss_scale_of(model).value == 128.0


# -- a state of another model ----------------------------------------------------------------------


def _sized(cls: Any, *shapes: tuple[int, ...]) -> tuple[list[nn.Parameter], MPOptimizer]:
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    return params, MPOptimizer(cls(params, lr=0.1), emit="eager")


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adafactor])
@pytest.mark.parametrize("other", [(6, 2), (4,)])
def test_a_state_of_another_model_is_refused(
    other: tuple[int, ...], cls: Any, has_stepped: bool
) -> None:
    """Before anything is loaded: the training goes on as if nobody had tried."""
    theirs, saved = _sized(cls, (3, 2), other)
    mine, optimizer = _sized(cls, (3, 2), (5, 2))
    for p in (*theirs, *mine):
        p.grad = torch.ones_like(p)
    saved.step()
    if has_stepped:
        optimizer.step()
    saved.param_groups[0]["lr"] = 0.7
    before = optimizer.state_dict()
    text = (
        r"parameter 1, of shape \(5, 2\), was saved with(out)? .*, which has shape \(5, [12]\) here"
    )
    with pytest.raises(MPCompileError, match=text):
        optimizer.load_state_dict(saved.state_dict())
    assert repr(optimizer.state_dict()) == repr(before)
    assert len(optimizer.state) == 2 * has_stepped
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in mine)  # type: ignore[arg-type]
    optimizer.step()


def test_a_users_hook_may_make_the_state_fit() -> None:
    theirs, saved = _sized(torch.optim.AdamW, (6,))
    _, optimizer = _sized(torch.optim.AdamW, (3, 2))
    theirs[0].grad = torch.ones(6)
    saved.step()

    def reshape(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        entries = state["state"][0].items()
        return {**state, "state": {0: {k: v.view(3, 2) if v.ndim else v for k, v in entries}}}

    optimizer.register_load_state_dict_pre_hook(reshape)
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (3, 2)
