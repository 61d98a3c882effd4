"""Who may take a step: whatever loop a gradient ends up in, an overflow changes no parameter."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from overflowing import FP16, OVERFLOW, assert_unchanged, mlp, parameters
from torch import nn

from mpcompile import LossScale, MPCompileError, MPOptimizer, loss_scale_of, mpcompile
from mpcompile.scaling.parameters import of_optimizer


class Forced(torch.optim.Optimizer):
    """Makes a gradient of zeros where there is none, as Muon's author does; counts its steps."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            assert group["params"][-1].dim() > 0  # as he asks it for the shape of what he sends
            for p in group["params"]:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                p.data.mul_(0.99).sub_(p.grad, alpha=0.1)


OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda p: torch.optim.AdamW(p, lr=0.1),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
    lambda p: Forced(p, {}),
]


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize("emit", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_overflow_step_changes_nothing_and_is_counted(
    make: Callable[..., torch.optim.Optimizer], emit: str
) -> None:
    model = mpcompile(mlp(), **{**FP16, "emit": emit})
    optimizer = make(model.parameters())
    x = torch.randn(4, 8)

    def step(data: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        gradients = [p.grad for p in model.parameters()]
        optimizer.step()
        # Also after a skipped step they are there to be looked at.
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
        assert not of_optimizer(optimizer).hidden

    step(x)
    before, value = snapshot(model, optimizer), loss_scale_of(model).value
    step(x * 1e6)  # 8e6 has no FP16 value: inf in the first layer, nan gradients
    torch.testing.assert_close(snapshot(model, optimizer), before, rtol=0, atol=0, equal_nan=True)
    scale = loss_scale_of(model)
    assert (scale.skipped_steps, scale.value) == (1, value / 2)
    step(x)
    assert not torch.equal(model[0].weight, before["model"]["0.weight"])
    assert scale.skipped_steps == 1


def test_bf16_has_no_scale_unless_one_is_handed_over() -> None:
    for scale, skipped in (("dynamic", 0), (LossScale.static(8.0), 1)):
        model = mpcompile(mlp(), dtype=torch.bfloat16, emit="eager", loss_scale=scale)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (model(torch.ones(4, 8)) * float("inf")).sum().backward()
        optimizer.step()
        assert loss_scale_of(model).skipped_steps == skipped


def test_a_new_scale_does_not_recompile() -> None:
    model = mpcompile(mlp(), **FP16)
    scale = loss_scale_of(model)
    x = torch.randn(4, 8)
    for value in (2.0**16, 2.0**10, 3.0):
        scale.state = dataclasses.replace(scale.state, scale=value)
        with torch.compiler.set_stance("default" if value == 2.0**16 else "fail_on_recompile"):
            model.zero_grad()
            model(x).sum().backward()


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


# -- parameters upstream of a compiled model ------------------------------------------------------


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_a_plain_network_in_front_of_a_compiled_one(is_frozen: bool, fast: bool) -> None:
    """A generator, encoder or adapter in FP32, with an optimizer that holds nothing compiled."""
    plain, critic = mlp(out=8), mlp()
    compiled = mpcompile(frozen(critic) if is_frozen else critic, **FP16)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(plain.parameters())
    if fast:
        optimizer = MPOptimizer(optimizer, emit="eager")
    x = torch.randn(16, 8)

    def step(factor: float) -> None:
        optimizer.zero_grad()
        (compiled(plain(x)).mean() * factor).backward()
        optimizer.step()

    step(1.0)
    before, state = parameters(plain), copy.deepcopy(optimizer.state_dict()["state"])
    scale = loss_scale_of(compiled).value
    step(OVERFLOW)
    assert_unchanged(before, plain)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
    step(1.0)
    assert not torch.equal(plain[0].weight, before[0])
    assert loss_scale_of(compiled).value == scale / 2  # though nobody steps the critic
    assert all(p.isfinite().all() for p in parameters(plain))


def test_of_two_models_the_one_that_overflowed_is_blamed() -> None:
    """One optimizer holds both, and a plain layer in front of each."""
    plain = [mlp(out=8), mlp(out=8)]
    models = [mpcompile(mlp(), loss_scale=LossScale.dynamic(2.0**10), **FP16) for _ in plain]
    optimizer = torch.optim.SGD([p for m in (*plain, *models) for p in m.parameters()], lr=0.1)
    before = parameters(*plain, *models)
    for layer, model, factor in zip(plain, models, (OVERFLOW, 1.0), strict=True):
        (model(layer(torch.randn(4, 8))).sum() * factor).backward()
    optimizer.step()
    assert_unchanged(before, *plain, *models)
    states = [loss_scale_of(model).state for model in models]
    assert [(state.scale, state.skipped_steps) for state in states] == [(2.0**9, 1), (2.0**10, 0)]


def test_an_unrelated_optimizer_is_left_alone() -> None:
    """Its gradients are its own: what it does with a NaN is not our business."""
    compiled, plain, other = mpcompile(mlp(), **FP16), mlp(out=8), mlp()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    (compiled(plain(torch.randn(4, 8))).sum() * OVERFLOW).backward()
    other(torch.randn(4, 8)).sum().backward()
    before = parameters(other)
    optimizer.step()
    assert not torch.equal(before[0], other[0].weight)


def test_an_inf_of_ones_own_is_ones_own() -> None:
    """Where no graph ran backward since the optimizer looked, or none of them overflowed."""
    compiled, plain = mpcompile(mlp(), **FP16), mlp(out=8)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for runs in (True, True, False):
        before = parameters(plain)
        if runs:
            compiled(plain(torch.randn(4, 8))).sum().backward()
        else:
            plain[0].weight.grad = torch.full_like(plain[0].weight, torch.inf)
        optimizer.step()
        assert not torch.equal(before[0], plain[0].weight)
    assert not plain[0].weight.isfinite().any()
    assert loss_scale_of(compiled).skipped_steps == 0


def test_a_model_that_was_taken_out_is_another_optimizers() -> None:
    models = [mpcompile(mlp(), loss_scale=LossScale.static(64.0), **FP16) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [*model.parameters()]} for model in models], lr=0.1)
    for factor in (1.0, OVERFLOW):
        first, second = (model(torch.randn(4, 8)).sum() for model in models)
        (first + second * factor).backward()
        before = parameters(models[0])
        optimizer.step()
        assert not torch.equal(before[0], models[0][0].weight)
        del optimizer.param_groups[1:]
    assert [loss_scale_of(model).skipped_steps for model in models] == [0, 0]


# -- several optimizers after one backward -------------------------------------------------------


def test_each_optimizer_looks_for_itself() -> None:
    """The first one's look does not hide the overflow from the second, however late it steps."""
    model = mpcompile(mlp(), **FP16)
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2))
    x = torch.randn(4, 8)
    (model(x).sum() * OVERFLOW).backward()
    before = parameters(model)
    first.step()
    model(x).sum().backward()  # the second optimizer accumulates
    torch.nn.utils.clip_grad_value_(model[2].parameters(), 1.0)  # and made numbers of inf and NaN
    for p in model[2].parameters():
        p.grad.nan_to_num_(0.0)
    second.step()
    assert_unchanged(before[2:], model[2])


def test_an_overflow_after_a_good_step_of_the_same_backward_lowers_the_scale() -> None:
    """An optimizer for each parameter, stepped in the backward: the last layer's is always good."""
    model = mpcompile(mlp(), loss_scale=LossScale.dynamic(2.0**10), **FP16)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    good, bad = model[2].bias, model[0].weight
    model(torch.randn(4, 8)).sum().backward()
    bad.grad.fill_(float("inf"))
    optimizers[good].step()
    assert loss_scale_of(model).value == 2.0**10
    optimizers[bad].step()
    assert loss_scale_of(model).value == 2.0**9
    assert bad.isfinite().all()


class Sharpness(torch.optim.SGD):
    """As SAM: its step moves the weights, calls the closure there, and brings them back."""

    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        before = [p.detach().clone() for p in params]
        for p in params:
            p.data.add_(p.grad, alpha=0.1)
        closure()
        for p, old in zip(params, before, strict=True):
            if p.grad is not None:
                p.data.copy_(old)
        self.base.step()


def test_an_overflow_in_the_closure_of_an_optimizer_that_steps_another() -> None:
    model, x = mpcompile(mlp(), **FP16), torch.ones(4, 8)
    optimizer = Sharpness(model.parameters())
    optimizer.base = torch.optim.SGD(model.parameters(), lr=0.1)
    for factor in (1.0, OVERFLOW, 1.0):
        before = parameters(model)
        model(x).sum().backward()
        optimizer.step(lambda factor=factor: (model(x).sum() * factor).backward())
        optimizer.zero_grad()
        assert torch.equal(before[0], model[0].weight) is (factor == OVERFLOW)
    assert loss_scale_of(model).skipped_steps == 1


class Halves(torch.optim.SGD):
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        super().step(closure)
        self.inner.step()


def test_an_overflow_in_the_closure_of_an_optimizer_with_one_for_other_weights() -> None:
    model, x = mpcompile(mlp(), **FP16), torch.ones(4, 8)
    weight, *others = model.parameters()
    optimizer = Halves([weight], lr=0.1)
    optimizer.inner = torch.optim.SGD(others, lr=0.1)
    before = parameters(model)
    optimizer.step(lambda: (model(x).sum() * OVERFLOW).backward())
    assert_unchanged(before, model)


# -- gradients that nobody steps with -------------------------------------------------------------


def hand_written(model: nn.Module, guarded: bool, factor: float) -> None:
    model.zero_grad()
    (model(torch.ones(4, 8)).square().mean() * factor).backward()
    if guarded and loss_scale_of(model).overflowed():
        return
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad


def test_an_update_written_by_hand() -> None:
    model = mpcompile(mlp(), **FP16)
    hand_written(model, True, 1.0)
    before, value = parameters(model), loss_scale_of(model).value
    hand_written(model, True, OVERFLOW)
    assert_unchanged(before, model)
    assert (loss_scale_of(model).skipped_steps, loss_scale_of(model).value) == (1, value / 2)
    hand_written(model, True, 1.0)
    assert not torch.equal(before[0], model[0].weight)


@pytest.mark.slow("trainings that overflow, against FP64")
def test_an_unguarded_update_with_an_overflow_is_an_error() -> None:
    """Nothing stands between `.grad` and a loop of one's own; the next forward says what to do."""
    model = mpcompile(mlp(), **FP16)
    hand_written(model, False, 1.0)
    hand_written(model, False, OVERFLOW)
    with pytest.raises(MPCompileError, match=r"if not loss_scale_of\(model\).overflowed"):
        hand_written(model, False, 1.0)


def test_a_leaf_that_was_never_finite_is_not_an_update() -> None:
    softmax = mpcompile(lambda x: torch.softmax(x, -1), **FP16)
    for _ in range(3):
        x = torch.full((2, 8), -torch.inf, requires_grad=True)
        softmax(x).sum().backward()
        assert x.grad.isnan().all()


def test_an_unguarded_loop_moves_the_scale() -> None:
    model = mpcompile(mlp(), loss_scale=LossScale.dynamic(4.0, growth_interval=2), **FP16)
    for _ in range(5):
        hand_written(model, False, 1.0)
    assert loss_scale_of(model).value == 16.0
