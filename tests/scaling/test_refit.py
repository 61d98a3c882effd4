"""After an overflow the fitting scale is found at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from overflowing import FP16, OVERFLOW, mlp, parameters
from torch import nn

from mpcompile import LossScale, MPOptimizer, loss_scale_of, mpcompile
from mpcompile.scaling.fit_scale import _Trial
from mpcompile.scaling.scale_search import CALM

WAYS = [("O1", False), ("O2", False), ("O2", True)]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The scales at which a call was run again."""
    found: list[float] = []
    again = _Trial.again

    def counted(self: _Trial, saved: Any, at: float) -> None:
        found.append(at)
        again(self, saved, at)

    monkeypatch.setattr(_Trial, "again", counted)
    return found


class Training:
    """A model with SGD at a rate of 1, so that a step moves it by its gradients, and beside it the
    same one in FP64.
    """

    def __init__(
        self, level: str, generated: bool, model: nn.Module | None = None, **options: Any
    ) -> None:
        torch.manual_seed(0)
        model = mlp() if model is None else model
        self.exact = copy.deepcopy(model).double()
        self.model = mpcompile(model, level=level, **{**FP16, **options})
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        self.optimizer = MPOptimizer(sgd, emit="eager") if generated else sgd
        self.scale = loss_scale_of(self.model)

    def step(self, *factors: float) -> bool:
        """One step over a batch for each factor. Returns whether it was skipped; if not, checks by
        how much it moved.
        """
        before, skipped = parameters(self.model), self.scale.skipped_steps
        with torch.no_grad():
            for p, q in zip(self.model.parameters(), self.exact.parameters(), strict=True):
                q.copy_(p)
        self.optimizer.zero_grad()
        self.exact.zero_grad()
        for factor in factors:
            x = torch.randn(4, 8)
            (self.model(x).sum() * factor).backward()
            (self.exact(x.double()).sum() * factor).backward()
        self.optimizer.step()
        if self.scale.skipped_steps > skipped:
            return True
        after = self.model.parameters()
        for old, p, q in zip(before, after, self.exact.parameters(), strict=True):
            assert q.grad is not None
            moved = (old - p.detach()).double()
            # The FP32 difference of two parameters rounds as they do.
            assert (moved - q.grad).norm() <= 1e-2 * q.grad.norm() + 1e-6 * old.norm()
        self._reset(before)
        return False

    def _reset(self, before: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for old, p in zip(before, self.model.parameters(), strict=True):
                p.copy_(old)

    def settle(self) -> None:
        """Train on until nothing is searched for."""
        for _ in range(20 * CALM):
            self.step(1.0)
            if not self.scale.search.searching:
                return
        raise AssertionError("the scale does not settle")


@pytest.mark.parametrize(("level", "generated"), WAYS)
def test_while_it_settles_no_step_is_skipped(level: str, generated: bool) -> None:
    """The first gradients are small; those of later steps overflow by 2**4, 2**7, 2**8."""
    training = Training(level, generated)
    assert not training.step(2.0**-6)
    start = training.scale.value
    for factor in (1.0, 2.0**4, 2.0**8, 1.0):
        assert not training.step(factor)
    assert training.scale.value < start
    assert training.scale.skipped_steps == 0


@pytest.mark.parametrize(("level", "generated"), WAYS)
def test_no_two_steps_in_a_row_are_skipped(level: str, generated: bool, runs: list[float]) -> None:
    """The first overflow finds nobody prepared, and the next step halves until it fits."""
    training = Training(level, generated)
    training.settle()
    runs.clear()
    before = training.scale.value
    assert training.step(2.0**10)
    assert runs == []
    assert not training.step(2.0**10)
    assert runs[0] == before / 4  # the step itself halved it once
    assert training.scale.value == runs[-1] < before / 2**5
    assert not training.step(2.0**10)


def test_grad_scaler_halves_once_for_each_step(runs: list[float]) -> None:
    training = Training("O1", False, loss_scale="grad_scaler")
    values = []
    while training.step(2.0**4):
        values.append(training.scale.value)
    assert values == [2.0 ** (15 - i) for i in range(len(values))]
    assert len(values) > 4
    assert runs == []


@pytest.mark.parametrize(("level", "generated"), WAYS)
def test_the_scale_grows_soon_after_its_start(
    level: str, generated: bool, runs: list[float]
) -> None:
    """The start leaves room for gradients eight times as large. If they don't come, it is given
    up: the scale ends at the largest one that fits, as GradScaler's does.
    """
    training = Training(level, generated)
    training.step(1.0)
    start, tried = training.scale.value, len(runs)
    training.settle()
    top = training.scale.value
    assert top >= 4 * start
    # One try too many, in which no step was lost, unless it came to 2**16 first.
    assert runs[tried:] == ([top] if top < 2.0**16 else [])
    assert training.scale.skipped_steps == 0


def test_the_try_after_many_good_steps_costs_one_step_and_no_search(runs: list[float]) -> None:
    training = Training("O1", False, loss_scale=LossScale.dynamic(growth_interval=50))
    training.settle()
    runs.clear()
    top = training.scale.value
    skipped = [training.step(1.0) for _ in range(120)]
    assert sum(skipped) == 2  # each time that 50 steps were good
    assert training.scale.value in (top, top * 2)
    assert runs == []


@pytest.mark.parametrize(("level", "generated"), WAYS)
def test_gradients_accumulated_over_a_move_of_the_scale_are_right(
    level: str, generated: bool
) -> None:
    """The second of them lowers the scale, below what the first is stored with at O2."""
    training = Training(level, generated)
    training.step(1.0)
    before = training.scale.value
    assert not training.step(2.0**-2, 2.0**6, 2.0**-2)
    assert training.scale.value < before


def test_a_model_that_fits_no_scale_is_not_searched_for_ever(runs: list[float]) -> None:
    training = Training("O1", False)
    training.step(1.0)
    for _ in range(3):
        assert training.step(OVERFLOW)
    runs.clear()
    for _ in range(4):
        assert training.step(OVERFLOW)
    assert runs == []


def _lbfgs(model: nn.Module, steps: int) -> tuple[list[int], list[float]]:
    """A slope that ends at a wall: the second point lies far behind it. How often each step called
    its closure, and the losses.
    """
    with torch.no_grad():
        model.weight.zero_()  # type: ignore[operator, union-attr]
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=6, tolerance_grad=0.0, tolerance_change=0.0
    )
    calls: list[int] = []
    losses: list[float] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        at = model(torch.ones(4, 1))
        loss = (-0.5 * at + 1e-2 * at.square() + 10 * F.relu(at - 3).square()).mean()
        loss.backward()
        calls[-1] += 1
        losses.append(float(loss.detach()))
        return loss

    for _ in range(steps):
        calls.append(0)
        optimizer.step(closure)  # type: ignore[arg-type]
    return calls, losses


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_lbfgs_takes_the_steps_of_fp32(level: str) -> None:
    """A gradient that overflows is made again at once. If it was hidden, the step would end where
    it is, at the worst point.
    """
    wanted, losses = _lbfgs(nn.Linear(1, 1, bias=False), 3)
    assert losses[2] > 1000, "no spike"
    model = mpcompile(nn.Linear(1, 1, bias=False), level=level, **FP16)
    calls, ours = _lbfgs(model, 3)
    assert calls == wanted
    assert ours[:4] == pytest.approx(losses[:4], rel=0.02)
    assert min(ours) == pytest.approx(min(losses), rel=0.02)
    assert loss_scale_of(model).skipped_steps == 0


def test_an_optimizer_that_calls_its_closure_once_waits_for_nothing(runs: list[float]) -> None:
    """Trainers hand a closure to every optimizer; an overflow skips the step, as without one."""
    training = Training("O1", False)
    training.settle()
    runs.clear()

    def closure(factor: float) -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = training.model(torch.randn(4, 8)).sum() * factor
        loss.backward()
        return loss

    training.optimizer.step(lambda: closure(2.0**10))  # type: ignore[arg-type, return-value]
    assert training.scale.skipped_steps == 1
    assert runs == []


@pytest.mark.parametrize("generated", [False, True])
def test_a_step_compiled_as_a_whole_skips_no_two_in_a_row(generated: bool) -> None:
    model, scale = mlp(), LossScale.dynamic()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-9)
    optimizer = MPOptimizer(sgd, emit="eager") if generated else sgd

    def step(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum() * factor
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = mpcompile(step, level="O2" if generated else "O1", loss_scale=scale, **FP16)
    skipped = []
    for factor in (1.0, 2.0**10, 2.0**10, 2.0**16, 2.0**16, 1.0):
        compiled(torch.ones(4, 8), torch.tensor(factor))
        skipped.append(scale.skipped_steps)
    assert skipped == [0, 1, 1, 2, 2, 2]


def test_a_scale_that_was_saved_before_its_start_was_found_searches() -> None:
    """Loaded into one whose start is given."""
    scale = LossScale.dynamic(2.0**10)
    scale.load_state_dict(LossScale.dynamic().state_dict())
    assert not Training("O1", False, loss_scale=scale).step(2.0**6)
    assert scale.value < 2.0**16
