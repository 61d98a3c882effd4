"""What one thread traces and compiles, another one doesn't see."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.callback import CallbackTrigger, callback_handler

from mpcompile import MPOptimizer, compiled_plans, loss_scale_of, mpcompile
from mpcompile.torch_inside import tracing_settings

pytestmark = pytest.mark.inside

LOW: dict[str, Any] = {"dtype": torch.float16, "emit": "aot_eager"}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def in_another_thread(function: Callable[[], Any]) -> Any:
    """What a function returns or raises, called in a thread of its own."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


class Meanwhile(torch.optim.AdamW):
    """While its step is traced, another thread runs a function."""

    def __init__(self, params: Any, function: Callable[[], Any]) -> None:
        super().__init__(params)
        self.function = function

    def step(self, closure: Any = None) -> Any:
        results.append(in_another_thread(self.function))
        return super().step(closure)


results: list[Any] = []


@pytest.fixture(autouse=True)
def no_results() -> Iterator[None]:
    results.clear()
    yield
    results.clear()


def trained_with(function: Callable[[], Any]) -> None:
    """Compile the step of an optimizer, and run a function in another thread meanwhile."""
    model = mpcompile(net(), **LOW)
    optimizer = MPOptimizer(Meanwhile(model.parameters(), function), emit="eager")
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    assert results


@pytest.mark.parametrize(
    "around", [nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["", "autocast"]
)
def test_a_model_is_served_while_a_step_is_traced(around: Callable[[], Any]) -> None:
    """And autocast of the other thread is still taken off."""
    served, x = mpcompile(net(), **LOW).eval(), torch.randn(3, 8)
    with torch.no_grad():
        expected = served(x)

    def serve() -> torch.Tensor:
        with torch.no_grad(), around():
            result: torch.Tensor = served(x)
        return result

    trained_with(serve)
    assert all(torch.equal(result, expected) for result in results)


def test_a_step_of_another_thread_keeps_its_guard() -> None:
    model = mpcompile(net(), **LOW)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(3, 8)
    model(x).sum().backward()
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]

    def overflow() -> None:
        optimizer.zero_grad()
        (model(x).sum() * 1e30).backward()
        optimizer.step()

    trained_with(overflow)
    assert all(map(torch.equal, model.parameters(), before))
    assert loss_scale_of(model).skipped_steps == len(results)


def test_a_step_through_super_runs_no_hook_while_it_is_traced() -> None:
    class Twice(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # from now on, its step runs hooks
    model, calls = mpcompile(net(), **LOW), []
    optimizer = MPOptimizer(Twice(model.parameters()), emit="eager")
    optimizer.register_step_pre_hook(lambda *_: calls.append(torch.compiler.is_compiling()))
    step = torch.optim.AdamW.step
    for _ in range(3):
        model(torch.randn(3, 8)).sum().backward()
        optimizer.step()
    assert calls == [False] * 3
    assert torch.optim.AdamW.step is step


class AnotherCompiles:
    """Another thread compiles something, from `begin` to `end`: Dynamo says nothing of what others
    compile meanwhile.
    """

    def __init__(self) -> None:
        self._began, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with callback_handler.install_callbacks(CallbackTrigger.LAZY_BACKWARD, "0/0"):
            self._began.set()
            self._ends.wait()

    def begin(self) -> None:
        self._thread.start()
        self._began.wait()

    def end(self) -> None:
        self._ends.set()
        self._thread.join()


@pytest.mark.parametrize("begins_first", [True, False])
def test_settings_are_set_and_taken_back_whatever_else_compiles(begins_first: bool) -> None:
    other, first, layer = AnotherCompiles(), nn.Linear(8, 8), nn.LSTM(8, 8)
    begin = torch.compiler.assume_constant_result(lambda: other.begin())

    def call(x: torch.Tensor) -> torch.Tensor:
        if not begins_first:
            begin()  # while Dynamo traces this
        return layer(first(x))[0]

    model = mpcompile(call, dtype=torch.bfloat16, emit="eager", strict=True)
    if begins_first:
        other.begin()
    try:
        model(torch.randn(3, 2, 8))
        assert not torch._dynamo.config.allow_rnn
    finally:
        other.end()
    (plan,) = compiled_plans(model)
    assert "LOW" in [n.precision for n in plan.nodes if n.op == "aten::lstm"]


# -- all at once -----------------------------------------------------------------------------------


def filled(module: nn.Module) -> nn.Module:
    """With numbers that don't come from the generator that all threads share."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return module


def batch(number: int) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(number))


def compiles() -> list[torch.Tensor]:
    model = mpcompile(filled(net()), level="O2", **LOW)
    optimizer = MPOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), emit="eager")
    for i in range(4):
        model(batch(i)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters()]


def overflows() -> list[torch.Tensor]:
    model = mpcompile(filled(net()), **LOW)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(40):
        (model(batch(i)).square().mean() * (1e30 if i % 7 == 3 else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    scale = loss_scale_of(model)
    return [*model.parameters(), torch.tensor([scale.value, scale.skipped_steps])]


def drops() -> list[torch.Tensor]:
    model = filled(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    @mpcompile(dtype=torch.float16, emit="eager")
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for i in range(3):
        step(batch(i))
    assert step.left is None
    return [*model.parameters()]


@pytest.mark.sweep("four threads for a minute")
def test_what_four_threads_do_is_what_one_does() -> None:
    """One compiles, one trains with overflows, one makes models and drops them, one serves."""
    served = mpcompile(filled(net()), **LOW).eval()

    def serves() -> list[torch.Tensor]:
        with torch.no_grad():
            return [served(batch(i)) for i in range(5)]

    tasks = (compiles, overflows, drops, serves)
    alone = [task() for task in tasks]
    end = time.monotonic() + 60

    def again(task: Callable[[], list[torch.Tensor]], expected: list[torch.Tensor]) -> int:
        count = 0
        while time.monotonic() < end:
            assert all(map(torch.equal, task(), expected)), task.__name__
            count += 1
        return count

    with ThreadPoolExecutor(len(tasks)) as pool:
        counts = [*pool.map(again, tasks, alone)]
    assert all(counts)


def test_after_a_compile_no_call_waits_for_one() -> None:
    model = mpcompile(net(), **LOW)
    model(torch.randn(2, 8)).sum().backward()
    assert tracing_settings._idle.is_set()
