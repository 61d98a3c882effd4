"""What a watched step leaves behind in memory: nothing."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from mpcompile import loss_scale_of, mpcompile
from mpcompile.ir.inputs import SCALE
from mpcompile.observe.watch import Watch
from mpcompile.scaling.skips_in_a_row import Trouble

DEPTH = 4


class Double(torch.autograd.Function):
    """A user's own function, whose operators a watched step records one by one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(Double.apply(x)))  # type: ignore[no-untyped-call]
        return x


class Alive:
    """Weak references to the Watch objects made, and to the activations that they saw."""

    def __init__(self) -> None:
        self.watches: list[weakref.ref[Watch]] = []
        self.results: list[weakref.ref[torch.Tensor]] = []

    def now(self) -> tuple[int, int]:
        """How many of each are alive."""
        counts = [sum(ref() is not None for ref in refs) for refs in (self.watches, self.results)]
        return counts[0], counts[1]


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Alive:
    monkeypatch.setenv("MPCOMPILE_PROFILE", "none")
    seen, init, saw = Alive(), Watch.__init__, Watch.saw

    def started(self: Watch, *args: Any) -> None:
        init(self, *args)
        seen.watches.append(weakref.ref(self))

    def noted(self: Watch, n: fx.Node, result: Any) -> None:
        saw(self, n, result)
        if n.op == "call_function" and isinstance(result, torch.Tensor):
            seen.results.append(weakref.ref(result))

    monkeypatch.setattr(Watch, "__init__", started)
    monkeypatch.setattr(Watch, "saw", noted)
    return seen


def _model() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A model that has run a few steps, and a call of it that is to be watched next."""
    torch.manual_seed(0)
    model = mpcompile(Deep(), dtype=torch.float16, emit="eager", loss_scale=128.0, strict=True)
    x = torch.randn(4, 8, requires_grad=True)
    model(torch.tanh(x)).square().mean().backward()
    loss_scale_of(model).trouble.pending = True

    def call() -> torch.Tensor:
        result: torch.Tensor = model(torch.tanh(x))
        return result

    return model, call


@pytest.mark.slow("trainings that overflow, against FP64")
def test_after_a_backward_nothing_is_alive(alive: Alive) -> None:
    model, call = _model()
    call().square().mean().backward()
    assert len(alive.results) > DEPTH
    loss_scale_of(model).trouble.give_up()
    gc.collect()
    assert alive.now() == (0, 0)


@pytest.mark.slow("trainings that overflow, against FP64")
def test_nor_without_a_backward(alive: Alive) -> None:
    model, call = _model()
    result = call()
    del result
    loss_scale_of(model).trouble.give_up()
    gc.collect()
    assert alive.now() == (0, 0)


@pytest.mark.slow("trainings that overflow, against FP64")
def test_a_call_that_fails_is_over_before_the_compiled_one_runs(
    alive: Alive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where memory ran out, the compiled graph needs what the failed run has held."""
    _, call = _model()
    run_node = Watch.run_node
    then: list[int] = []

    def fails(self: Watch, n: fx.Node) -> Any:
        if n.op == "output" and SCALE in {x.target for x in n.graph.nodes}:  # the rewritten one
            raise torch.OutOfMemoryError("no memory\nbut many lines")
        return run_node(self, n)

    def gives_up(self: Trouble) -> None:  # right before the compiled graph runs
        gc.collect()
        then.append(alive.now()[1])

    monkeypatch.setattr(Watch, "run_node", fails)
    monkeypatch.setattr(Trouble, "give_up", gives_up)
    with caplog.at_level(logging.WARNING, logger="mpcompile.repair"):
        call().square().mean().backward()
    assert len(alive.results) > DEPTH
    assert then == [0]
    gc.collect()
    assert alive.now() == (0, 0)
    (record,) = [r for r in caplog.records if r.name == "mpcompile.repair"]
    assert record.getMessage().endswith("OutOfMemoryError: no memory")
