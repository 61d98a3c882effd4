"""The first steps in FP16: steps skipped until the loss scale fits, and what finding it costs.

By default the first backward finds the scale (`mpcompile/scaling/fit_scale.py`);
`loss_scale="grad_scaler"` starts at 65536, as `torch.amp.GradScaler` does, and skips steps until
the scale has come down to where the gradients fit. Both train the same models, from the same
weights on the same batches, beside plain PyTorch in FP32: at O1 with a plain optimizer, and at O2
with an MPOptimizer. How far apart two trainings drift that differ in nothing but roundings is shown
by one more in FP32, whose first weights are rounded to FP16.

A deep GPT is compiled as a whole, block by block, with its equal blocks sharing one compile, and as
a whole training step. Timed are first steps in fresh processes: *cold* with empty caches, *warm*
with those that the cold one has left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.optim import Optimizer

from benchmarks.first_steps.deep import PEER, REGIONAL, STEP, Deep, First, measure_deep
from benchmarks.first_steps.trainings import (
    BATCHES,
    TINY,
    WORK,
    MakeOptimizer,
    Prepare,
    Training,
    Work,
)
from benchmarks.harness.report import Claims, Report, Settings, Table, paragraphs, plain
from benchmarks.harness.timing import idle_wait, seconds_of
from mpcompile import MPOptimizer, loss_scale_of, mpcompile
from mpcompile.scaling import fit_scale


def run(settings: Settings) -> Report:
    """Train everything; under `settings.quick` three small models for two steps."""
    device = settings.device
    work = TINY if settings.quick else WORK
    runs = {one.name: train_all(one, work, device) for one in work.trainings}
    costs = {one.name: cost(one, work.compiler, device) for one in work.compiled}
    # What the host's compilers take; a GPU is too dear to wait for them.
    deep = measure_deep(work.deep, device) if device.type == "cpu" else {}
    return Report(
        title="The first steps in FP16",
        notes=[*paragraphs(__doc__), *_how(work)],
        tables=[
            *(_table(level, runs) for level in LEVELS),
            _cost_table(costs),
            _deep_table(work.deep, deep),
        ],
        verdicts={**dict(_verdicts(runs, work.steps)), **dict(_deep_verdicts(deep))},
        data={
            "steps": work.steps,
            "runs": plain(runs),
            "loss_difference": {
                name: {one: difference(group, one) for one in group} for name, group in runs.items()
            },
            "search": costs,
            "deep": plain(deep),
        },
    )


# -- measure ---------------------------------------------------------------------------------------
# The trainings in FP32 and with either way to start, and what a cold first step takes.

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

    def time_find(*args: Any, **kwargs: Any) -> Any:
        asked.clear()
        start = time.perf_counter()
        result = find(*args, **kwargs)
        spent.seconds += time.perf_counter() - start - asked[0]
        return result

    with unittest.mock.patch.multiple(
        fit_scale._Trial, again=count_again, backward=time_backward, find=time_find
    ):
        yield spent


# -- report ----------------------------------------------------------------------------------------
# Losses beside those in FP32, verdicts and tables.

SHARE = 0.9
"""Of the models, that skip no step with the default scale."""


MOST = {REGIONAL: 1.2, STEP: 1.5}
"""How many times as long as the peer's first step one may take."""


def difference(group: Mapping[str, Run], arm: str) -> float:
    """The largest difference of a loss to FP32's, relative to that."""
    pairs = zip(group[arm].losses, group[FP32].losses, strict=True)
    return max(abs(ours - full) / abs(full) for ours, full in pairs)


def _how(work: Work) -> list[str]:
    return [
        f"{work.steps} steps on {BATCHES} batches that come round; random weights and, but for the "
        f"text, random data. `emit={work.emit!r}`: the rewritten graph, operator by operator. "
        "The difference is the largest one of a loss to that of the same step in FP32, relative "
        "to it; FP32's is that of the rounded weights. With two models the numbers are of the "
        "generator / the discriminator.",
        "More runs: forward and backward passes of a graph beyond the ones asked for, which the "
        "search makes, over all steps. Seconds: one cold first step at O1, optimizer "
        f"included, with `emit={work.compiler!r}` and empty caches.",
        f"Deep GPT: medians over rounds ({work.deep.rounds}) of all arms in turn; a ratio is the "
        "median of those within a round. Forward, backward and AdamW, from the call that compiles "
        "to the end of the step, without what any compiler imports. By its blocks, the rest of the "
        f"model runs as torch runs it, but under {REGIONAL}.",
    ]


def _numbers(values: Sequence[float]) -> str:
    return " / ".join(f"{value:g}" for value in values)


def _table(level: str, runs: Mapping[str, Mapping[str, Run]]) -> Table:
    rows = []
    for name, group in runs.items():
        cells = [name]
        for scale in (FOUND, FIXED):
            one = group[arm(level, scale)]
            cells += [
                _numbers(one.first), _numbers(one.last), _numbers(one.skipped),
                f"{difference(group, arm(level, scale)):.2%}",
            ]  # fmt: skip
        again = str(group[arm(level, FOUND)].again)
        rows.append([*cells, f"{difference(group, ROUNDED):.2%}", again])
    columns = ("scale after 1", "after all", "skipped", "loss off by")
    ways = (f"{how}: {column}" for how in ("found", "65536") for column in columns)
    how = "a plain optimizer" if level == "O1" else "MPOptimizer"
    return Table(f"{level} with {how}", ("model", *ways, "FP32 off by", "more runs"), rows)


def _cost_table(costs: Mapping[str, Mapping[str, float]]) -> Table:
    rows = [
        (name, f"{one['first']:.1f}", str(one["again"]), f"{one['search']:.3f}",
         f"{one['search'] / one['first']:.2%}", f"{one['second']:.3f}")
        for name, one in costs.items()
    ]  # fmt: skip
    columns = ("model", "first step, s", "more runs", "of it the search, s", "share", "2nd step, s")
    return Table("What the search costs, beside a cold compile", columns, rows)


def _deep_table(deep: Deep, found: Mapping[str, First]) -> Table:
    rows = []
    for name, first in found.items():
        cold, warm = (f"{statistics.median(s):.1f}" for s in (first.cold, first.warm))
        rows.append([name, cold, warm, *(f"{x:.2f}x" for x in first.over(found[PEER]))])
    columns = ("arm", "cold, s", "warm, s", "cold, of the peer's", "warm, of the peer's")
    title = f"The first step of a GPT of {deep.layers} blocks, {deep.width} wide, in BF16"
    return Table(f"{title}; the peer is {PEER} under autocast", columns, rows)


def _deep_verdicts(found: Mapping[str, First]) -> Claims:
    for name, most in MOST.items():
        if name in found:
            took = dict(zip(("cold", "warm"), found[name].over(found[PEER]), strict=True))
            for start, times in took.items():
                claim = f"{name}, {start}: first step in {most:g}x of {PEER}'s"
                yield f"{claim}: {times:.2f}x", times <= most


def _verdicts(runs: Mapping[str, Mapping[str, Run]], steps: int) -> Claims:
    for level in LEVELS:
        calm = sum(not any(group[arm(level, FOUND)].skipped) for group in runs.values())
        claim = f"{level}: no step of the first {steps} is skipped for {SHARE:.0%} of the models"
        yield f"{claim}: {calm} of {len(runs)}", calm >= SHARE * len(runs)
