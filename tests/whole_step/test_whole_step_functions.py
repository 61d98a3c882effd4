"""Kinds of functions, their arguments, shapes that change, and errors of the user's own."""

import copy
import functools
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_of import module_of
from torch import nn
from whole_steps import BOTH, O1, O1_MP, SETTINGS, Run, Setting, agree, batches, traces

from mpcompile import LossScale, MPCompileError, MPOptimizer, compiled_plans, mpcompile, train_step

Step = Callable[..., Any]


class Trainer:
    """A training step as a method, and as a call."""

    def __init__(self, run: Run) -> None:
        self.model, self.optimizer, self.loss_of = run.classifier()

    def step(
        self, x: torch.Tensor, y: torch.Tensor, f: torch.Tensor, *, weight: float = 1.0
    ) -> torch.Tensor:
        loss = self.loss_of(x, y, f) * weight
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    __call__ = step


KINDS: dict[str, Callable[[Run], Step]] = {
    "method": lambda run: Trainer(run).step,
    "partial": lambda run: functools.partial(Trainer(run).step, weight=0.5),
    "object": lambda run: Trainer(run),
}


@pytest.mark.slow_rows("compiles whole steps of several kinds, against FP64")
@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_functions(setting: Setting, kind: str) -> None:
    agree(KINDS[kind], batches(4, factors={2: 1e30}), setting)


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@BOTH
def test_keyword_arguments(setting: Setting) -> None:
    run = Run(True, setting)
    step = run.step(Trainer(run).step)
    x, y, f = batches(1)[0]
    with traces() as found:
        first = step(x=x, y=y, f=f)
        torch.testing.assert_close(step(x, y=y, f=f, weight=0.0), torch.zeros(()))
    assert step.left is None
    assert first > 1
    assert len(found) == 2  # a float is a constant


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@pytest.mark.sampled(3)
@BOTH
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_the_batch_size_changes(setting: Setting, dynamic: bool | None) -> None:
    sizes = [8, 8, 5, 12, 8, 3]
    calls = [batches(1, rows=n)[0] for n in sizes]
    run, pieces = Run(True, setting), Run(False, setting)
    torch.manual_seed(0)
    whole = Trainer(run).step
    torch.manual_seed(0)
    theirs = Trainer(pieces).step
    step = mpcompile(whole, dynamic=dynamic, **run.options())
    with traces() as found:
        for call in calls:
            torch.testing.assert_close(step(*call), theirs(*call), rtol=1e-3, atol=1e-5)
    assert step.left is None, step.left
    assert len(found) == {None: 2, True: 1, False: 4}[dynamic]
    for name, value in pieces.everything().items():
        if value is not None:
            torch.testing.assert_close(run.everything()[name], value, rtol=1e-4, atol=1e-6)


@SETTINGS
def test_a_bad_index_is_the_users_error(setting: Setting) -> None:
    run = Run(True, setting)
    model = run.model(nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8)))
    optimizer = run.sgd(model.parameters())
    step = run.step(run.usual(lambda x, y: F.cross_entropy(model(x), y), optimizer))
    good, y = torch.tensor([1, 2, 3]), torch.tensor([3, 2, 1])
    for _ in range(2):
        step(good, y)
    before = run.everything()
    with pytest.raises(IndexError, match="out of range"):
        step(torch.tensor([1, 2, 99]), y)
    torch.testing.assert_close(run.everything(), before, rtol=0, atol=0)
    step(good, y)
    assert step.left is None
    assert not torch.equal(run.everything()["0.1.weight"], before["0.1.weight"])


@BOTH
def test_an_error_while_it_is_traced_is_the_users_error(setting: Setting) -> None:
    run = Run(True, setting)
    step = run.step(Trainer(run).step)
    x, y, f = batches(1)[0]
    with pytest.raises(Exception, match=r"shape|size|multipl") as raised:
        step(x[:, :3], y, f)
    said = re.sub(r'File "[^"]*"', "", str(raised.value))  # a clone's folder may be called so
    assert "mpcompile" not in said
    step(x, y, f)
    assert step.left is None, step.left


@BOTH
def test_two_threads(setting: Setting) -> None:
    runs = [Run(True, setting) for _ in range(2)]
    steps = [r.step(Trainer(r).step) for r in runs]
    failed: list[BaseException] = []

    def train(step: Step) -> None:
        try:
            for call in batches(4):
                step(*call)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=train, args=(s,)) for s in steps]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed, failed
    assert [s.left for s in steps] == [None, None]


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@pytest.mark.parametrize("setting", [O1, O1_MP], ids=str)
def test_a_model_that_is_compiled_itself(setting: Setting) -> None:
    def program(run: Run) -> Step:
        trainer = Trainer(run)
        if run.whole:
            mpcompile(trainer.model, **run.options())
        return trainer.step

    agree(program, batches(4), setting)


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@pytest.mark.parametrize("setting", [O1, O1_MP], ids=str)
def test_tracing_one_step_leaves_another_one_as_it_is(setting: Setting) -> None:
    (x, y, f), *_ = batches(1)
    runs = [Run(True, setting) for _ in range(2)]
    first, second = (run.step(Trainer(run).step) for run in runs)
    with traces() as found:
        for _ in range(2):
            first(x, y, f)
        for _ in range(2):
            second(x, y, f)
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # one more, and gone
        for _ in range(2):
            first(x, y, f)
    assert first.left is None
    assert second.left is None
    assert len(found) == 2


# `train_step(model, optimizer, loss_fn)`: the step of a plain loop, as one function.


def two_inputs() -> Any:
    return module_of(
        lambda m, x, shift: m.last(F.gelu(m.first(x) + shift)),
        first=nn.Linear(16, 32), last=nn.Linear(32, 8),
    )  # fmt: skip


def options() -> dict[str, Any]:
    scale = LossScale.dynamic(init_scale=1024.0)
    return {"level": "O2", "emit": "aot_eager", "loss_scale": scale}


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_is_the_loop_that_one_would_write(accumulate: int) -> None:
    model = two_inputs()
    other = copy.deepcopy(model)
    optimizer = MPOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), emit="eager")
    others = MPOptimizer(torch.optim.AdamW(other.parameters(), lr=1e-2), emit="eager")
    step = train_step(model, optimizer, F.cross_entropy, accumulate=accumulate, **options())
    other = mpcompile(other, **options())
    for _ in range(4):
        x, shift, y = torch.randn(8, 16), torch.randn(8, 32), torch.randint(0, 8, (8,))
        loss = step(x, shift, y)
        expected = torch.zeros(())
        for part in zip(*(one.chunk(accumulate) for one in (x, shift, y)), strict=True):
            one = F.cross_entropy(other(*part[:-1]), part[-1]) / accumulate
            one.backward()
            expected += one.detach()
        others.step()
        others.zero_grad()
        # In pieces at O2, the sum of two gradients has the low dtype.
        loose: dict[str, float] = {"rtol": 1e-2, "atol": 1e-3} if accumulate > 1 else {}
        torch.testing.assert_close(loss, expected, **loose)
        assert not loss.requires_grad
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, **loose)
            assert p.grad is None
    assert step.left is None  # type: ignore[attr-defined]


def test_a_batch_that_cannot_be_split() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = train_step(model, optimizer, F.mse_loss, accumulate=3, **options())
    with pytest.raises(MPCompileError, match="accumulate=3 can't split a batch of 4 into"):
        step(torch.zeros(4, 4), torch.zeros(4, 4))
    assert model.weight.grad is None


def test_a_compiled_model_keeps_its_options() -> None:
    """Without options of the step's own: dtype=torch.bfloat16 isn't the default of a CPU."""
    model = mpcompile(two_inputs(), dtype=torch.bfloat16, level="O2", emit="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batch = torch.randn(8, 16), torch.randn(8, 32), torch.randint(0, 8, (8,))
    for step, low, level in (
        (train_step(model, optimizer, F.cross_entropy), "bfloat16", "O2"),
        (train_step(model, optimizer, F.cross_entropy, dtype="fp16"), "float16", "O2"),
        (train_step(model, optimizer, F.cross_entropy, level="O0"), "float32", "O0"),
    ):
        step(*batch)
        plans = compiled_plans(step)
        assert {plan.level for plan in plans} == {level}
        assert {plan.dtype for plan in plans} == {low}
