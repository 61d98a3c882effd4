"""Gradients that Dynamo would lose between a backward and what reads them: nothing is trained then,
or too much, without an error.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from as_written import AsWritten
from torch import nn
from whole_steps import BOTH, Run, Setting, agree, agree_left, batches, net

from mpcompile import MPCompileError, MPOptimizer, mpcompile
from mpcompile.whole_step import tracing

# -- parameters that Dynamo has seen in an optimizer -----------------------------------------------


def reads_settings(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Dynamo then marks all parameters as static."""
    torch.compile(lambda x: x * optimizer.param_groups[0]["lr"], backend="eager")(torch.ones(1))


def ran_in_pieces(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(end="")
        return loss.detach()

    with pytest.warns(match="runs in pieces"):
        mpcompile(step, emit="eager")(torch.ones(2, 16))


def one_is_marked(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch._dynamo.mark_static_address(next(model.parameters()))


def after(before: Callable[..., None]) -> Callable[[Run], Callable[..., torch.Tensor]]:
    """A plain program, `before` which something was done with its model and optimizer."""

    def program(run: Run) -> Callable[..., torch.Tensor]:
        model, optimizer, loss_of = run.classifier()
        before(model, optimizer)

        def step(x: torch.Tensor, y: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()  # first: what Dynamo sees of parameters first is the optimizer
            loss = loss_of(x, y, f)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    return program


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@BOTH
@pytest.mark.parametrize("before", [reads_settings, ran_in_pieces, one_is_marked])
def test_an_optimizer_that_dynamo_has_seen(setting: Setting, before: Callable[..., None]) -> None:
    agree(after(before), batches(4, factors={2: 1e30}), setting)


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@BOTH
def test_a_graph_that_lost_its_gradients_is_refused(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, where the cause is left in place: the graph itself shows it."""
    monkeypatch.setattr(tracing, "_not_static", lambda theirs, tensor: theirs(tensor))
    calls = batches(4, factors={2: 1e30})
    agree_left(after(reads_settings), calls, setting, "constant of the graph|no gradient")


def test_parameters_of_no_optimizer() -> None:
    """Some of them are marked as static."""
    model = net()
    one_is_marked(model, torch.optim.SGD(net().parameters()))
    assert_trains_as_python(model, written_and_cleared)


# -- updates by hand -------------------------------------------------------------------------------


def written_and_cleared(p: nn.Parameter) -> torch.Tensor | None:
    p -= 0.1 * p.grad  # type: ignore[operator]
    p.grad = None
    return None


def written_twice_and_read(p: nn.Parameter) -> torch.Tensor | None:
    p -= 0.1 * p.grad  # type: ignore[operator]
    p *= 0.99
    norm = p.grad.norm()  # type: ignore[union-attr]
    p.grad = None
    return norm


def written_by_a_method(p: nn.Parameter) -> torch.Tensor | None:
    p = p.sub_(0.1 * p.grad)  # type: ignore[operator, assignment]
    p.grad = None
    return None


def the_gradient_too(p: nn.Parameter) -> torch.Tensor | None:
    grad = p.grad
    grad *= 2  # type: ignore[operator]
    p -= 0.05 * p.grad  # type: ignore[operator]
    p.grad = None
    return None


def half_is_kept(p: nn.Parameter) -> torch.Tensor | None:
    p -= 0.1 * p.grad  # type: ignore[operator]
    p.grad = 0.5 * p.grad  # type: ignore[operator]
    return None


def training(model: nn.Module, update: Callable[..., Any], *, whole: bool) -> Callable[..., Any]:
    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if not whole:
            torch._dynamo.graph_break()
        with torch.no_grad():
            seen = [update(p) for p in model.parameters()]
        return loss.detach(), seen

    return step


def assert_trains_as_python(
    model: nn.Module, update: Callable[..., Any], *, whole: bool = True
) -> None:
    other = copy.deepcopy(model)
    plain = training(other, update, whole=True)
    ours = mpcompile(training(model, update, whole=whole), emit="eager", dtype=torch.bfloat16)
    for x, y, _ in batches(4):
        torch.testing.assert_close(ours(x, y), plain(x, y), rtol=2e-2, atol=2e-3)
    assert (ours.left is None) is whole
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-3)
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=5e-2, atol=2e-3)


@pytest.mark.parametrize(
    "update",
    [written_and_cleared, written_twice_and_read, written_by_a_method, the_gradient_too,
     half_is_kept],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*runs in pieces")
@pytest.mark.parametrize("whole", [True, False])
def test_updates_by_hand(update: Callable[..., Any], whole: bool) -> None:
    assert_trains_as_python(net(), update, whole=whole)


# -- settings that the step changes itself ---------------------------------------------------------


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@BOTH
@pytest.mark.parametrize("where", ["before the backward", "after it", "after the step"])
def test_a_learning_rate_is_set_inside(setting: Setting, where: str) -> None:
    """Dynamo writes it after its graph, in which a step would read the one of before."""

    def program(run: Run) -> Callable[..., torch.Tensor]:
        model = run.model(net())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loss_of = run.forward(lambda x, y: F.cross_entropy(model(x), y))

        def use(rate: float) -> None:
            for group in optimizer.param_groups:
                group["lr"] = rate

        def step(x: torch.Tensor, y: torch.Tensor, rate: float) -> torch.Tensor:
            loss = loss_of(x, y)
            if where == "before the backward":
                use(rate)
            loss.backward()
            if where == "after it":
                use(rate)
            optimizer.step()
            optimizer.zero_grad()
            if where == "after the step":
                use(rate)
            return loss.detach()

        return step

    calls = [(x, y, 0.5 / (i + 1)) for i, (x, y, _) in enumerate(batches(4))]
    agree_left(program, calls, setting, "changes settings")


def test_a_learning_rate_is_read_inside() -> None:
    """It is looked up before the parameters are."""
    model, other = net(), net()
    other.load_state_dict(model.state_dict())

    def training(model: nn.Module) -> tuple[Callable[..., Any], Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> tuple[float, torch.Tensor]:
            rate = optimizer.param_groups[0]["lr"]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return rate, loss.detach()

        return step, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    (ours, schedule), (plain, other_schedule) = training(model), training(other)
    compiled = mpcompile(ours, emit="eager", dtype=torch.bfloat16)
    for x, y, _ in batches(5):
        torch.testing.assert_close(compiled(x, y), plain(x, y), rtol=2e-2, atol=2e-3)
        schedule.step()
        other_schedule.step()
    assert compiled.left is None
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-3)


# -- steps that run in pieces once -----------------------------------------------------------------


class Lion(AsWritten):
    """An optimizer of a user's own; its first step makes its state, so it runs in pieces."""

    def update(self, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
        if "mean" not in state:
            state["mean"] = torch.zeros_like(p)
        p.add_(state["mean"].lerp(p.grad, 0.1).sign(), alpha=-group["lr"])
        state["mean"].lerp_(p.grad, 0.1)


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@pytest.mark.parametrize("prints", [False, True])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.filterwarnings("ignore:.*runs in pieces")
def test_gradients_are_true_in_a_step_that_runs_in_pieces(clips: bool, prints: bool) -> None:
    """At O2 in FP16, where the pieces of a module store them times the loss scale."""
    model = net()
    other = copy.deepcopy(model)

    def training(model: nn.Module, optimizer: Any) -> Callable[..., torch.Tensor]:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            F.cross_entropy(model(x), y).backward()
            parameters = list(model.parameters())
            if clips:
                norm = nn.utils.clip_grad_norm_(parameters, 0.1)
            else:
                norm = torch.stack([p.grad.norm() for p in parameters]).norm()  # type: ignore[union-attr]
            if prints:
                print(end="")
            optimizer.step()
            optimizer.zero_grad()
            return norm

        return step

    plain = training(other, Lion(other.parameters(), lr=1e-3))
    optimizer = MPOptimizer(Lion(model.parameters(), lr=1e-3), emit="eager")
    ours = mpcompile(training(model, optimizer), level="O2", dtype=torch.float16, emit="eager")
    for x, y, _ in batches(3):
        torch.testing.assert_close(ours(x, y), plain(x, y), rtol=1e-2, atol=1e-3)
    assert (ours.left is not None) is prints


def test_a_step_that_runs_in_pieces_once_has_no_mode() -> None:
    """It runs operator by operator, and a mode is Inductor's."""
    model = net()
    optimizer = Lion(model.parameters(), lr=1e-3)
    step = Run.usual(lambda x, y, factor: F.cross_entropy(model(x), y) * factor, optimizer)
    ours: Any = mpcompile(step, mode="reduce-overhead")
    ours(*batches(1)[0])
    assert ours.left is None
    assert optimizer.state.keys() == {*model.parameters()}


# -- gradients of gradients ------------------------------------------------------------------------


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_gradient_penalty_is_refused_from_the_first_backward(level: str) -> None:
    """Through a model that is compiled by itself. That backward searches for the scale's start."""
    model, (x, _, _) = net(), batches(1)[0]
    options: dict[str, Any] = {"level": level, "dtype": torch.float16, "emit": "aot_eager"}

    def step(x: torch.Tensor) -> None:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()

    mpcompile(model, **options)
    with pytest.raises(MPCompileError, match=r"forward or mpcompile\(step\)"):
        step(x)
