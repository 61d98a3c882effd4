"""What a library says once in a process ends no graph: `Logger.warning_once` of transformers."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import config

from mpcompile import MPOptimizer, compiled_plans, mpcompile

LOGGER = logging.getLogger("a library")


@functools.cache
def warning_once(self: logging.Logger, *args: Any, **kwargs: Any) -> None:
    """As transformers writes it."""
    self.warning(*args, **kwargs)


@pytest.fixture(autouse=True)
def a_library_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)


class Says(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        LOGGER.warning_once("this is old")  # type: ignore[attr-defined]
        return self.last(hidden)


def in_one_graph() -> int:
    model = mpcompile(Says(), emit="eager", dtype=torch.bfloat16, strict=True)
    model(torch.randn(2, 8)).sum().backward()
    return len(compiled_plans(model))


def in_a_whole_step() -> int:
    model = Says()
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @mpcompile(emit="eager", dtype=torch.bfloat16, strict=True)  # raises if it ran in pieces
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [step(torch.ones(2, 8)).item() for _ in range(3)]
    assert losses[2] < losses[0]
    return len(compiled_plans(step))


@pytest.mark.parametrize("graphs", [in_one_graph, in_a_whole_step])
def test_it_ends_no_graph(graphs: Callable[[], int]) -> None:
    theirs = set(config.ignore_logger_methods)
    assert graphs() == 1
    assert set(config.ignore_logger_methods) == theirs


def test_what_is_logged_each_time_still_ends_one() -> None:
    class Logs(Says):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            LOGGER.info("here")
            return self.last(hidden)

    model = mpcompile(Logs(), emit="eager", dtype=torch.bfloat16)
    model(torch.randn(2, 8)).sum().backward()
    assert len(compiled_plans(model)) == 2
