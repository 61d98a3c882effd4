"""Forward and backward of any model, timed in turns: compile FP32, compile + autocast, O1 and O2.

What `small`, `gpt` and `padding` share. The peers are the two ways to train that a user of
torch.compile has, in FP32 and under autocast(bfloat16); which of them is faster depends on
the model, and mpcompile should not have to be told: each level is held against the better one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from benchmarks.harness.report import Report, Table, environment, plain, where
from benchmarks.harness.timing import (
    Arm,
    Ratio,
    far_behind,
    idle_wait,
    low_dtype,
    ratio,
    summarize,
    take_turns,
)
from benchmarks.harness.ways import Way, trainer_for
from benchmarks.models import Sample


def compare(
    name: str, title: str, notes: Sequence[str], work: Work, device: torch.device
) -> Report:
    """Time each model under every arm, one model after the other; `name` is the benchmark's."""
    record = environment(device)
    found = measure_all(work, device)
    ratios = {model: over_better(samples) for model, samples in found.seconds.items()}
    return Report(
        name=f"{name}_{device.type}",
        title=f"{title} on {where(device)}",
        notes=[*notes, _how(work), *found.left_out],
        tables=[_times(found), _ratios(ratios)],
        verdicts=_verdicts(ratios),
        data={
            "rounds": work.rounds,
            "steps": {model.name: model.steps for model in work.models},
            "first_loss": found.losses,
            "seconds_per_step": found.seconds,
            "ratios": {
                model: {f"{arm} over {base}": plain(r) for arm, r in group.items()}
                for model, (base, group) in ratios.items()
            },
        },
        environment=record,
    )


# -- measure ---------------------------------------------------------------------------------------
# The arms, and each model timed under them.

FP32, AUTOCAST, O1, O2 = "compile FP32", "compile + autocast", "mpcompile O1", "mpcompile O2"
PEERS = (FP32, AUTOCAST)
OURS = (O1, O2)

REFUSED = "could not create a primitive"
"""What oneDNN says of a BF16 LSTM on a CPU with AVX2: torch's own autocast fails there."""


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


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the models showed.

    Attributes:
        seconds: model -> arm -> seconds per step, a sample a round.
        losses: model -> arm -> the first step's.
        left_out: sentences, which arm of which model is not timed and why.
    """

    seconds: dict[str, dict[str, list[float]]] = dataclasses.field(default_factory=dict)
    losses: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    left_out: list[str] = dataclasses.field(default_factory=list)


def measure_all(work: Work, device: torch.device) -> Measured:
    """Time each model under every arm, one model after the other."""
    found = Measured()
    for model in work.models:
        steps = {
            arm: Begun(way, model, work.emit, device).compile().step
            for arm, way in ways(device).items()
        }
        found.losses[model.name] = {}
        for arm, step in list(steps.items()):
            try:
                found.losses[model.name][arm] = float(step())
            except RuntimeError as error:
                if arm != AUTOCAST or REFUSED not in str(error):
                    raise
                del steps[arm]
                why = f"{model.name}: {arm} can't run here, torch says: {error}."
                found.left_out.append(why)
        turns = [Arm(arm, step) for arm, step in steps.items()]
        spent = far_behind(turns, wait=idle_wait(device)).get(AUTOCAST)
        if spent is not None:
            turns = [turn for turn in turns if turn.name != AUTOCAST]
            found.left_out.append(f"{model.name}: {AUTOCAST} takes {spent:.1f} s a step; left out.")
        found.seconds[model.name] = take_turns(
            turns, rounds=work.rounds, steps=model.steps, settle=max(1, model.steps // 4),
            wait=idle_wait(device),
        )  # fmt: skip
    return found


def ways(device: torch.device) -> dict[str, Way]:
    """The arms, by name; with torch's fused optimizers where they have one."""
    low = low_dtype(device)
    found = (
        Way(FP32, compiled=True, fused=True),
        Way(AUTOCAST, torch.bfloat16, compiled=True, fused=True),
        Way(O1, low, "O1", fused=True),
        Way(O2, low, "O2", fused=True, generated=False),
    )
    return {way.name: way for way in found}


class Begun:
    """A model that returns its loss under one arm, on one fixed batch."""

    def __init__(self, way: Way, timed: Timed, emit: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self.trainer = trainer_for(way, emit, device)
        self.model = timed.build().to(device)
        self._batch = timed.sample.draw(device)

    def compile(self) -> Begun:
        """Make the model ready to be compiled in its first step."""
        self.trainer.model(self.model)
        return self

    def loss(self) -> torch.Tensor:
        with self.trainer.forward():
            loss: torch.Tensor = self.model(*self._batch)
        return loss

    def step(self) -> torch.Tensor:
        """Forward and backward; nothing waits for the device."""
        self.model.zero_grad()
        loss = self.loss()
        self.trainer.backward(loss)
        return loss.detach()


# -- report ----------------------------------------------------------------------------------------
# Each level against the better peer: ratios, verdicts and tables.

OVER_BETTER = 0.98
"""Each level of ours over the better peer: no slower, up to what a run can tell apart."""


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


def _how(work: Work) -> str:
    return (
        "Forward (the loss is inside the compiled function) and backward on one batch, in BF16 "
        f"where an arm runs low. Median [p10, p90] of {work.rounds} interleaved rounds. A ratio is "
        "the median over the rounds of the ratio within a round, with its 95% bootstrap interval; "
        "above 1, mpcompile is faster."
    )


def _times(found: Measured) -> Table:
    rows = [
        (model, arm, summarize(samples).text(digits=2), f"{found.losses[model][arm]:.4f}")
        for model, arms in found.seconds.items()
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
