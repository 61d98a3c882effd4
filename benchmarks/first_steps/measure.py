"""The trainings in FP32 and with either way to start, and what a cold first step takes."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import unittest.mock
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.optim import Optimizer

from benchmarks.first_steps.trainings import MakeOptimizer, Prepare, Training, Work
from benchmarks.harness.timing import idle_wait, seconds_of
from mpcompile import MPOptimizer, loss_scale_of, mpcompile
from mpcompile.scaling import fit_scale

FOUND, FIXED = "dynamic", "grad_scaler"
FP32, ROUNDED = "FP32", "FP32, weights rounded"
LEVELS = ("O1", "O2")


@dataclasses.dataclass(frozen=True)
class Run:
    """One training. A list has a number for each of its models.

    Attributes:
        first, last: the loss scale after the first step, and after the last.
        skipped: steps left out.
        again: forward and backward passes that the search ran beyond the ones asked for.
    """

    losses: list[float]
    first: list[float] = dataclasses.field(default_factory=list)
    last: list[float] = dataclasses.field(default_factory=list)
    skipped: list[int] = dataclasses.field(default_factory=list)
    again: int = 0


def arm(level: str, scale: str) -> str:
    """The name of a run: at "O1" or "O2", with the loss scale `FOUND` or `FIXED`."""
    return f"{level}, {scale}"


def train_all(training: Training, work: Work, device: torch.device) -> dict[str, Run]:
    """The same training in FP32, twice, and at each level with each way to start."""
    found = {
        name: _train(training, {"round": name == ROUNDED}, work, device) for name in (FP32, ROUNDED)
    }
    for level in LEVELS:
        for scale in (FOUND, FIXED):
            options = {"level": level, "loss_scale": scale}
            found[arm(level, scale)] = _train(training, options, work, device)
    return found


def _train(training: Training, options: Mapping[str, Any], work: Work, device: torch.device) -> Run:
    torch._dynamo.reset()
    torch.manual_seed(0)
    prepare, models = _preparing(options, work.emit)
    losses: list[float] = []
    first: list[float] = []
    with search() as spent:
        for loss in training.loop(prepare, device, work.steps):
            losses.append(float(loss))
            first = first or [loss_scale_of(model).value for model in models]
    scales = [loss_scale_of(model) for model in models]
    last, skipped = [s.value for s in scales], [s.skipped_steps for s in scales]
    return Run(losses, first, last, skipped, spent.again)


def _preparing(options: Mapping[str, Any], emit: str) -> tuple[Prepare, list[nn.Module]]:
    """What a loop calls on its models, and those that were compiled.

    Args:
        options: for `mpcompile()`; without a level the model stays as it is, but for `round`.
    """
    models: list[nn.Module] = []

    def prepare(model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        if "level" not in options:
            for p in model.parameters() if options["round"] else ():
                p.data = p.data.half().float()
            return model, make(model.parameters())
        mpcompile(model, dtype=torch.float16, emit=emit, strict=True, **options)
        models.append(model)
        optimizer = make(model.parameters())
        if options["level"] == "O2":
            optimizer = MPOptimizer(optimizer, emit="eager")
        return model, optimizer

    return prepare, models


def cost(training: Training, compiler: str, device: torch.device) -> dict[str, float]:
    """Seconds of a "first" step with empty caches, of them the "search", and of a "second" step;
    and how often the search ran the model "again"; O1.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    prepare, _ = _preparing({"level": "O1", "loss_scale": FOUND}, compiler)
    with fresh_cache(), search() as spent:
        steps = training.loop(prepare, device, 2)
        first, second = (seconds_of(lambda: next(steps), idle_wait(device)) for _ in range(2))
    return {"first": first, "search": spent.seconds, "again": spent.again, "second": second}


# -- search ----------------------------------------------------------------------------------------
# What the search for the loss scale takes.


@dataclasses.dataclass
class Search:
    """What searching has taken: runs of forward and backward, and seconds."""

    again: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def search() -> Iterator[Search]:
    """Count what is run beyond the one forward and backward that were asked for."""
    spent, asked = Search(), [0.0]
    again, backward, find = (getattr(fit_scale._Trial, n) for n in ("again", "backward", "find"))

    def count_again(*args: Any) -> Any:
        spent.again += 1
        return again(*args)

    def time_backward(*args: Any) -> Any:
        start = time.perf_counter()
        result = backward(*args)
        asked.append(time.perf_counter() - start)
        return result

    def time_find(*args: Any) -> Any:
        asked.clear()
        start = time.perf_counter()
        result = find(*args)
        spent.seconds += time.perf_counter() - start - asked[0]
        return result

    with unittest.mock.patch.multiple(
        fit_scale._Trial, again=count_again, backward=time_backward, find=time_find
    ):
        yield spent
