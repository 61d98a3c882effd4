"""Each level against the better peer: ratios, verdicts and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness.ratios import Ratio, ratio, summarize
from benchmarks.harness.report import Report, Table, plain

from .measure import OURS, PEERS, Measured, Work

__all__ = ["make_report", "over_better"]

OVER_BETTER = 0.98
"""Each level of ours over the better peer: no slower, up to what a run can tell apart."""


def make_report(
    name: str,
    title: str,
    notes: Sequence[str],
    work: Work,
    found: Measured,
    record: Mapping[str, str],
) -> Report:
    """The whole report; `record` says what was measured on, as `environment` does."""
    ratios = {model: over_better(samples) for model, samples in found.seconds.items()}
    return Report(
        name=name,
        title=title,
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
