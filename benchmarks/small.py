"""Networks of small matrix products: an MLP, a narrow transformer, an LSTM.

Below a hundred or so rows and columns, a product in BF16 may take longer than one in FP32, and a
cast as long as the product. What is won here is won by leaving things alone. On a GPU all of them
are launches of kernels that take no time: what counts is how many.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import torch

from benchmarks.harness import timing
from benchmarks.harness.report import Claims, Report, Settings, Table, plain, where
from benchmarks.models import GPT2, MLP, Sample, Tagger, tokens
from benchmarks.step_times import AUTOCAST, OURS, PEERS, REFUSED, Begun, Timed, Work, ways


def _transformer(width: int, length: int, layers: int = 2) -> functools.partial[GPT2]:
    return functools.partial(
        GPT2, vocab=128, context=length, width=width, layers=layers, heads=2
    )  # fmt: skip


WORK = Work(
    models=(
        Timed("MLP, B32 D32", functools.partial(MLP, inputs=32, width=32),
              Sample((32, 32), (32,), 10), steps=200),
        Timed("MLP, B64 D64", MLP, Sample((64, 64), (64,), 10), steps=200),
        Timed("GPT, B4 T32 D32 L2", _transformer(32, 32), tokens(4, 32, 128, 128), steps=40),
        Timed("GPT, B8 T32 D64 L2", _transformer(64, 32), tokens(8, 32, 128, 128), steps=40),
        Timed("LSTM tagger, B8 T16 D64", Tagger, tokens(8, 16, 256, 16), steps=40),
    ),
    rounds=80,
)  # fmt: skip

_NOTE = (
    "B examples, T tokens, width D, L layers; two heads, a vocabulary of 128 (256 for the LSTM). "
    "torch.compile leaves the graph at the LSTM, which then runs on torch's own kernel, as it does "
    "under mpcompile."
)

TINY = Work(
    models=(
        Timed("MLP", functools.partial(MLP, inputs=8, width=8, layers=1),
              Sample((4, 8), (4,), 10), steps=1),
        Timed("GPT", _transformer(16, 8, layers=1), tokens(2, 8, 128, 128), steps=1),
        Timed("LSTM tagger", functools.partial(Tagger, width=8), tokens(2, 4, 256, 16), steps=1),
    ),
    rounds=1,
    emit="eager",
)  # fmt: skip


def run(settings: Settings) -> Report:
    """Time each network; under `settings.quick` smaller ones, once, without compiling."""
    return _compared(TINY if settings.quick else WORK, settings.device)


def rerun(device: torch.device) -> Report:
    """The same in fewer rounds, to be held against the committed ratios."""
    return _compared(dataclasses.replace(WORK, rounds=20), device)


def _compared(work: Work, device: torch.device) -> Report:
    found = measure_all(work, device)
    how = (
        "Forward (the loss is inside the compiled function) and backward on one batch, in BF16 "
        f"where an arm runs low. {timing.how_compared(work.rounds)}"
    )
    ratios = {model: over_better(samples) for model, samples in found.seconds.items()}
    return Report(
        title=f"Networks of small matrix products on {where(device)}",
        notes=[_NOTE, how, *found.left_out],
        tables=[_times(found), _ratios(ratios)],
        verdicts=dict(_verdicts(ratios)),
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
    )


# -- measure ---------------------------------------------------------------------------------------
# Each model timed under every arm.


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
            arm: Begun(way, model, work.emit, device).step for arm, way in ways(device).items()
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
        turns = [timing.Arm(arm, step) for arm, step in steps.items()]
        spent = timing.far_behind(turns, wait=timing.idle_wait(device)).get(AUTOCAST)
        if spent is not None:
            turns = [turn for turn in turns if turn.name != AUTOCAST]
            found.left_out.append(f"{model.name}: {AUTOCAST} takes {spent:.1f} s a step; left out.")
        found.seconds[model.name] = timing.take_turns(
            turns, rounds=work.rounds, steps=model.steps, settle=max(1, model.steps // 4),
            wait=timing.idle_wait(device),
        )  # fmt: skip
    return found


# -- report ----------------------------------------------------------------------------------------
# Each level against the better peer: ratios, verdicts and tables.

OVER_BETTER = 0.98
"""Each level of ours over the better peer: no slower, up to what a run can tell apart."""


def over_better(samples: Mapping[str, list[float]]) -> tuple[str, dict[str, timing.Ratio]]:
    """The peer with the smaller median, and each level of ours over it."""
    base = min(
        (p for p in PEERS if p in samples), key=lambda peer: timing.summarize(samples[peer]).median
    )
    return base, {arm: timing.ratio(samples[base], samples[arm]) for arm in OURS}


def _verdicts(ratios: Mapping[str, tuple[str, Mapping[str, timing.Ratio]]]) -> Claims:
    for model, (base, group) in ratios.items():
        for arm, found in group.items():
            claim = f"{model}: {arm} at least {OVER_BETTER}x the better peer, {base}"
            yield f"{claim}: {found.paired:.2f}x", found.paired >= OVER_BETTER


def _times(found: Measured) -> Table:
    rows = [
        (model, arm, timing.summarize(samples).text(digits=2), f"{found.losses[model][arm]:.4f}")
        for model, arms in found.seconds.items()
        for arm, samples in arms.items()
    ]
    return Table("Step", ("model", "arm", "forward + backward, ms", "first loss"), rows)


def _ratios(ratios: Mapping[str, tuple[str, Mapping[str, timing.Ratio]]]) -> Table:
    rows = [
        (model, base, *(str(group[arm]) for arm in OURS)) for model, (base, group) in ratios.items()
    ]
    return Table(
        "How many times faster than the better peer", ("model", "better peer", *OURS), rows
    )
