"""MPOptimizer in a training loop: whatever the loop does, what plain PyTorch would have made."""

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from as_written import AsWritten
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from twins import Twins

from mpcompile import LossScale, MPOptimizer, loss_scale_of, mpcompile
from mpcompile.optim import compiled
from mpcompile.optim.compiled import SMALL

pytestmark = pytest.mark.inside

INF = float("inf")
momentum = functools.partial(SGD, lr=0.1, momentum=0.9)
decayed = functools.partial(AdamW, lr=0.1, weight_decay=0.1)
fp16 = functools.partial(  # from 2**16 on, whatever the model
    mpcompile, dtype=torch.float16, emit="eager", strict=True, loss_scale="grad_scaler"
)


# -- hooks, closures, contexts ----------------------------------------------------------------


def test_hooks_of_either_object_and_of_torch_run_once_in_each_step() -> None:
    seen: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: seen.append(name)

    twins = Twins(decayed)
    inner = twins.optimizer._inner
    inner.register_step_pre_hook(note("inner pre"))
    inner.register_step_post_hook(note("inner post"))
    twins.optimizer.register_step_pre_hook(note("outer pre"))
    twins.optimizer.register_step_post_hook(note("outer post"))
    handle = register_optimizer_step_pre_hook(note("global pre"))
    twins.give()
    seen.clear()
    try:
        twins.optimizer.step()
        twins.optimizer.step()
    finally:
        handle.remove()
    once = ["global pre", "inner pre", "outer pre", "inner post", "outer post"]
    assert seen == once * 2
    inner.register_step_post_hook(note("late"))  # it runs around the step, and is no part of it
    twins.optimizer.step()
    assert seen[-1] == "late"
    assert twins.optimizer.compilations == 1


def test_a_hook_before_the_step_may_change_the_gradients() -> None:
    twins = Twins(momentum)
    for optimizer in twins.both:
        optimizer.register_step_pre_hook(
            lambda o, *_: [p.grad.mul_(0.5) for g in o.param_groups for p in g["params"]] and None  # type: ignore[func-returns-value]
        )
    twins.train(2)


def test_hooks_of_the_state_dict() -> None:
    twins = Twins(momentum)
    twins.step()
    twins.optimizer.register_state_dict_post_hook(lambda o, s: {**s, "epoch": 3})
    loaded: list[Any] = []
    twins.optimizer.register_load_state_dict_pre_hook(lambda o, s: loaded.append(s.pop("epoch")))
    state = twins.optimizer.state_dict()
    assert state["epoch"] == 3
    twins.optimizer.load_state_dict(state)
    assert loaded == [3]


def test_a_closure_makes_the_gradients() -> None:
    twins = Twins(momentum)

    def closure(params: Sequence[torch.Tensor], optimizer: Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((p.square().sum() for p in params), torch.zeros(()))
        loss.backward()
        return loss

    for _ in range(3):
        with torch.no_grad():
            wanted = twins.reference.step(lambda: closure(twins.theirs, twins.reference))  # type: ignore[arg-type, func-returns-value]
            loss = twins.optimizer.step(lambda: closure(twins.mine, twins.optimizer))
        torch.testing.assert_close(loss, wanted)
    twins.agree()
    twins.give()
    assert twins.optimizer.step() is None


class Matmul(AsWritten):
    """A step that autocast would change."""

    def update(self, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
        p.sub_(p.grad @ p, alpha=0.1)


@pytest.mark.parametrize("cls", [Matmul, SGD, AdamW])
def test_the_step_is_the_same_in_any_context(cls: type[Optimizer]) -> None:
    def make(p: Any) -> Optimizer:
        return cls(p, lr=0.1)  # type: ignore[call-arg]

    contexts: list[Callable[[], Any]] = [
        torch.no_grad,
        torch.enable_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
    ]
    for context in contexts:
        twins = Twins(make, [torch.randn(4, 4)])
        for _ in range(2):
            twins.give()
            twins.reference.step()
            with context():
                twins.optimizer.step()
        twins.agree()


@pytest.mark.slow("trains with several optimizers")
def test_a_graph_of_the_gradients_themselves() -> None:
    """`create_graph=True` leaves gradients that autograd tracks; the update is no part of it."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = MPOptimizer(Adam([parameter], lr=0.1))
    (parameter.grad,) = torch.autograd.grad(parameter.pow(3).sum(), parameter, create_graph=True)
    optimizer.step()
    assert parameter.is_leaf
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 0.9))


@pytest.mark.slow("trains with several optimizers")
def test_autograd_knows_that_the_parameters_changed() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = MPOptimizer(SGD([parameter], lr=0.1), emit="inductor")
    loss = parameter.square().sum()
    parameter.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow("trains with several optimizers")
def test_the_default_dtype_does_not_matter() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        twins = Twins(decayed, [torch.randn(3, 4, dtype=torch.float32)], emit="inductor")
        twins.train()
        twins.optimizer.zero_grad()
        twins.mine[0].grad = torch.full((3, 4), INF, dtype=torch.float32)
        twins.optimizer.step()
        assert twins.optimizer.skipped
    finally:
        torch.set_default_dtype(before)


def test_fused_and_foreach_settings_do_not_matter() -> None:
    for setting in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        twins = Twins(functools.partial(decayed, **setting))  # type: ignore[arg-type]
        twins.train(2)


def test_an_optimizer_that_took_steps_before_goes_on() -> None:
    twins = Twins(decayed)
    twins.optimizer = twins.optimizer._inner  # type: ignore[assignment]
    for step in range(6):
        if step == 3:
            twins.optimizer = MPOptimizer(twins.optimizer, emit="eager")
        twins.step()
    twins.agree()


# -- models -----------------------------------------------------------------------------------


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def generated(optimizer: Optimizer) -> MPOptimizer:
    return MPOptimizer(optimizer, emit="eager")


def plain(optimizer: Optimizer) -> Optimizer:
    return optimizer


@pytest.mark.parametrize("good", [0, 2])
@pytest.mark.parametrize(
    "kinds", [(generated, generated), (generated, plain), (plain, generated), (plain, plain)]
)
def test_an_overflow_reaches_every_optimizer_over_the_model(
    kinds: Sequence[Callable[[Optimizer], Optimizer]], good: int
) -> None:
    """And moves the scale once, as a good step does, whichever of the two steps first: the state of
    the scale moves to the device where a generated step is compiled, which may be after that.
    """
    model = fp16(mlp())
    optimizers = [
        kind(momentum(model[i].parameters())) for i, kind in zip((0, 2), kinds, strict=True)
    ]
    scale = loss_scale_of(model)

    def step(x: torch.Tensor) -> tuple[float, int, int]:
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        return scale.value, scale.state.good_steps, scale.skipped_steps

    for done in range(good):
        assert step(torch.randn(4, 8)) == (2.0**16, done + 1, 0)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert step(torch.full((4, 8), 1e6)) == (2.0**15, 0, 2)
    assert all(o.skipped for o in optimizers if isinstance(o, MPOptimizer))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert step(torch.randn(4, 8)) == (2.0**15, 1, 2)
    assert all(p.isfinite().all() for p in model.parameters())
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_one_optimizer_over_two_models_and_a_parameter_of_none() -> None:
    first, second = fp16(mlp()), fp16(mlp())
    free = nn.Parameter(torch.ones(2))
    optimizer = MPOptimizer(
        momentum([*first.parameters(), *second.parameters(), free]), emit="eager"
    )

    def step(x: torch.Tensor, y: torch.Tensor, z: float = 1.0) -> None:
        optimizer.zero_grad()
        loss = first(x).square().mean() + second(y).square().mean()
        (loss + (free * z).sum()).backward()
        optimizer.step()

    fine, huge = torch.randn(4, 8), torch.full((4, 8), 1e6)
    step(fine, fine)
    before = {k: v.clone() for k, v in first.state_dict().items()}
    step(fine, huge)  # one overflow: nobody moves, and each scale knows whose it was
    assert optimizer.skipped
    torch.testing.assert_close(first.state_dict(), before, rtol=0, atol=0)
    assert (loss_scale_of(first).value, loss_scale_of(second).value) == (2.0**16, 2.0**15)
    step(fine, fine, z=INF)  # nor is this one anybody's overflow
    assert optimizer.skipped
    torch.testing.assert_close(first.state_dict(), before, rtol=0, atol=0)
    assert (loss_scale_of(first).value, loss_scale_of(second).value) == (2.0**16, 2.0**15)
    step(fine, fine)
    assert not optimizer.skipped
    assert not torch.equal(first[0].weight, before["0.weight"])
    assert optimizer.compilations == 1


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_without_a_loss_scale_nothing_is_skipped(max_grad_norm: float | None) -> None:
    twins = Twins(momentum, loss_scale=LossScale.none(), max_grad_norm=max_grad_norm)
    for gradients in (None, [torch.full_like(p, INF) for p in twins.mine]):
        twins.give(gradients)
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(twins.theirs, max_grad_norm)
        for optimizer in twins.both:
            optimizer.step()
    for p, q in zip(twins.mine, twins.theirs, strict=True):
        torch.testing.assert_close(p, q, equal_nan=True)
        assert not p.isfinite().any()
    assert not twins.optimizer.skipped
    assert twins.optimizer.skipped_steps == 0


def test_a_dump_has_each_graph_before_and_after(tmp_path: Path) -> None:
    twins = Twins(momentum, dump=tmp_path)
    twins.step()
    (decision,) = tmp_path.glob("decision_*/00_decided.txt")
    assert "a gradient that is not finite skips the step" in decision.read_text()
    kinds = [*tmp_path.glob("step_*")]
    assert len(kinds) == len({p.shape for p in twins.mine})
    for directory in kinds:
        names = sorted(path.name for path in directory.iterdir())
        assert names == ["00_traced.txt", "01_rewritten.txt"]
        assert "unchanged where the step is skipped" in (directory / names[1]).read_text()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [torch.optim.Rprop, torch.optim.Adafactor, torch.optim.Muon])
def test_state_made_from_low_gradients_is_fp32(make: Any, dtype: torch.dtype) -> None:
    """These give state the dtype of a gradient, which at O2 is stored low."""
    net = nn.Linear(16, 16, bias=False)
    twin = copy.deepcopy(net)
    model = mpcompile(net, dtype=dtype, level="O2", emit="eager", strict=True)
    optimizer = MPOptimizer(make(model.parameters(), lr=0.01), emit="eager")
    plain = make(twin.parameters(), lr=0.01)
    x = torch.randn(32, 16)
    for _ in range(4):
        for one, step in ((model, optimizer), (twin, plain)):
            one(x).square().mean().backward()
            step.step()
            step.zero_grad()
    state = [v for v in optimizer.state[net.weight].values() if isinstance(v, torch.Tensor)]
    assert state
    assert all(v.dtype is torch.float32 for v in state)
    torch.testing.assert_close(net.weight, twin.weight, rtol=0.02, atol=0.02)


def test_nobody_computes_a_norm_that_was_not_asked_for() -> None:
    net = nn.Linear(4, 4)
    optimizer = MPOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), emit="eager")
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert optimizer.grad_norm.isnan()


# -- symbolic sizes --------------------------------------------------------------------------------


@pytest.mark.slow("trains with several optimizers")
@pytest.mark.parametrize("make", [momentum, decayed])
def test_what_is_compiled_for_one_size_serves_all(make: Callable[..., Optimizer]) -> None:
    """Inductor compiles an update for vectors of any size; other sizes compile nothing more."""

    def train(*counts: int) -> None:
        params = [torch.linspace(-1, 1, n).requires_grad_() for n in counts]
        exact = [p.detach().double().requires_grad_() for p in params]
        optimizers = [MPOptimizer(make(params)), make(exact)]
        for _ in range(3):
            for p in (*params, *exact):
                p.grad = p.detach().sin()
            for optimizer in optimizers:
                optimizer.step()
        for p, wanted in zip(params, exact, strict=True):
            torch.testing.assert_close(p.double(), wanted, rtol=1e-5, atol=1e-6)

    def sized() -> list[Any]:
        return [key for key in compiled._compiled if set(key[2]) != {None}]

    train(SMALL + 1, 2 * SMALL)
    before = sized()
    assert before
    train(SMALL + 7, 3 * SMALL)
    assert sized() == before
