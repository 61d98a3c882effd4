"""Forward and backward of any model, timed in turns: compile FP32, compile + autocast, O1 and O2.

What `conv` and `small` share. The peers are the two ways to train that a user of
torch.compile has, in FP32 and under autocast(bfloat16); which of them is faster depends on
the model, and mpcompile should not have to be told: each level is held against the better one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.harness import (
    Arm,
    Ratio,
    Report,
    Summary,
    Table,
    environment,
    far_behind,
    idle_wait,
    low_dtype,
    ratio,
    summarize,
    take_turns,
)
from benchmarks.models import Sample
from mpcompile import mpcompile

__all__ = [
    "ARMS",
    "AUTOCAST",
    "FP32",
    "O1",
    "O2",
    "OURS",
    "OVER_BETTER",
    "PEERS",
    "Timed",
    "Work",
    "measure",
    "over_better",
]

FP32, AUTOCAST, O1, O2 = "compile FP32", "compile + autocast", "mpcompile O1", "mpcompile O2"
PEERS = (FP32, AUTOCAST)
OURS = (O1, O2)
ARMS = (*PEERS, *OURS)

REFUSED = "could not create a primitive"
"""What oneDNN says of a BF16 LSTM on a CPU with AVX2: torch's own autocast fails there."""

OVER_BETTER = 0.98
"""Each level of ours over the better peer: no slower, up to what a run can tell apart."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """A model, its batch, and how many steps make a sample."""

    name: str
    build: Callable[[], nn.Module]
    sample: Sample
    steps: int


@dataclasses.dataclass(frozen=True)
class Work:
    """What is timed, and how often."""

    models: Sequence[Timed]
    rounds: int = 20
    emit: str = "inductor"


def measure(
    name: str, title: str, notes: Sequence[str], work: Work, device: torch.device
) -> Report:
    """Time each model under every arm, one model after the other."""
    record = environment(device)
    seconds: dict[str, dict[str, list[float]]] = {}
    losses: dict[str, dict[str, float]] = {}
    left_out: list[str] = []  # and why
    for model in work.models:
        steps = {arm: _step(model, arm, work.emit, device) for arm in ARMS}
        losses[model.name] = {}
        for arm, step in list(steps.items()):
            try:
                losses[model.name][arm] = float(step())
            except RuntimeError as error:
                if arm != AUTOCAST or REFUSED not in str(error):
                    raise
                del steps[arm]
                left_out.append(f"{model.name}: {arm} can't run here, torch says: {error}.")
        turns = [Arm(arm, step) for arm, step in steps.items()]
        spent = far_behind(turns, wait=idle_wait(device)).get(AUTOCAST)
        if spent is not None:
            turns = [turn for turn in turns if turn.name != AUTOCAST]
            left_out.append(f"{model.name}: {AUTOCAST} takes {spent:.1f} s a step; left out.")
        seconds[model.name] = take_turns(
            turns, rounds=work.rounds, steps=model.steps, settle=max(1, model.steps // 4),
            wait=idle_wait(device),
        )  # fmt: skip
    ratios = {model: over_better(samples) for model, samples in seconds.items()}
    return Report(
        name=name,
        title=title,
        notes=[*notes, _how(work), *left_out],
        tables=[_times(seconds, losses), _ratios(ratios)],
        verdicts=_verdicts(ratios),
        data={
            "rounds": work.rounds,
            "steps": {model.name: model.steps for model in work.models},
            "first_loss": losses,
            "seconds_per_step": seconds,
            "ratios": {
                model: {f"{arm} over {base}": dataclasses.asdict(r) for arm, r in group.items()}
                for model, (base, group) in ratios.items()
            },
        },
        environment=record,
    )


def _step(timed: Timed, arm: str, emit: str, device: torch.device) -> Callable[[], Any]:
    """Forward and backward of one compiled model on one fixed batch; returns the loss."""
    torch.manual_seed(0)
    model = timed.build().to(device)
    x, targets = timed.sample.draw(device)
    if arm in OURS:
        level = arm.rpartition(" ")[2]
        mpcompile(model, dtype=low_dtype(device), level=level, emit=emit, strict=True)
    else:
        model.compile(backend=emit)

    def step() -> torch.Tensor:
        model.zero_grad()
        low = torch.autocast(device.type, torch.bfloat16)
        with low if arm == AUTOCAST else contextlib.nullcontext():
            loss: torch.Tensor = model(x, targets)
        loss.backward()
        return loss.detach()

    return step


def over_better(samples: Mapping[str, list[float]]) -> tuple[str, dict[str, Ratio]]:
    """The peer with the smaller median, and each level of ours over it."""
    base = min((p for p in PEERS if p in samples), key=lambda peer: summarize(samples[peer]).median)
    return base, {arm: ratio(samples[base], samples[arm]) for arm in OURS}


def _verdicts(ratios: Mapping[str, tuple[str, Mapping[str, Ratio]]]) -> dict[str, bool]:
    verdicts = {}
    for model, (base, group) in ratios.items():
        for arm, found in group.items():
            claim = f"{model}: {arm} at least {OVER_BETTER}x the better peer, {base}"
            verdicts[f"{claim}: {found.paired:.2f}x"] = found.paired >= OVER_BETTER
    return verdicts


# -- tables ---------------------------------------------------------------------------------------


def _how(work: Work) -> str:
    return (
        "Forward (the loss is inside the compiled function) and backward on one batch, in BF16 "
        f"where an arm runs low. Median [p10, p90] of {work.rounds} interleaved rounds. A ratio is "
        "the median over the rounds of the ratio within a round, with its 95% bootstrap interval; "
        "above 1, mpcompile is faster."
    )


def _text(summary: Summary) -> str:
    return " ".join(
        form.format(1e3 * value)
        for form, value in zip(
            ("{:.2f}", "[{:.2f},", "{:.2f}]"), (summary.median, summary.p10, summary.p90),
            strict=True,
        )
    )  # fmt: skip


def _times(
    seconds: Mapping[str, Mapping[str, list[float]]], losses: Mapping[str, Mapping[str, float]]
) -> Table:
    rows = [
        (model, arm, _text(summarize(samples)), f"{losses[model][arm]:.4f}")
        for model, arms in seconds.items()
        for arm, samples in arms.items()
    ]
    return Table("Step", ("model", "arm", "forward + backward, ms", "first loss"), rows)


def _ratios(ratios: Mapping[str, tuple[str, Mapping[str, Ratio]]]) -> Table:
    rows = [
        (model, base, *(str(group[arm]) for arm in OURS)) for model, (base, group) in ratios.items()
    ]
    return Table(
        "How many times faster than the better peer", ("model", "better peer", *OURS), rows
    )
