"""Ratios to the peers and to no padding, verdicts and tables."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.harness.ratios import Ratio, ratio, summarize
from benchmarks.harness.report import Report, Table, plain, where
from benchmarks.step_times.measure import Work

from .measure import ALWAYS, AUTO, NEVER, OURS, PEERS, Found

__all__ = ["make_report"]

OVERHEAD = 0.03
"""What "auto" may cost on a CPU: of the step's time, and of the first step's."""
OVER_PEERS = 1.0
"""On CUDA, "auto" over the better peer."""


def make_report(
    work: Work, device: torch.device, found: Mapping[str, Found], record: Mapping[str, str]
) -> Report:
    """The whole report; `record` says what was measured on, as `environment` does."""
    return Report(
        name=f"padding_{device.type}",
        title=f"Padding for Tensor Cores on {where(device)}",
        notes=_notes(work, device),
        tables=[_times(found), _ratios(found), _shares(found)],
        verdicts=_verdicts(found, device),
        data={"rounds": work.rounds, "models": plain(found)},
        environment=record,
    )


def _notes(work: Work, device: torch.device) -> list[str]:
    return [
        "A GPT with the 50257 words of GPT-2, DLRM's towers and products of features, SSD's heads. "
        "Inductor's pad_mm is for GPUs; on a CPU both peers are the same program.",
        "Forward (the loss is inside the compiled function) and backward on one batch, in "
        f"{'FP16' if device.type == 'cuda' else 'BF16'}. Median [p10, p90] of {work.rounds} "
        "interleaved rounds. A ratio is the median over the rounds of the ratio within a round, "
        "with its 95% bootstrap interval; above 1, the arm is faster. Passes: ours that decide and "
        'place padding, as a share of the first step with "never", in which all is compiled.',
    ]


def _times(found: Mapping[str, Found]) -> Table:
    rows = [
        (
            name,
            arm,
            summarize(samples).text(digits=2),
            f"{one.first[arm]:.1f}",
            f"{one.losses[arm]:.4f}",
        )
        for name, one in found.items()
        for arm, samples in one.seconds.items()
    ]
    columns = ("model", "arm", "forward + backward, ms", "first step, s", "first loss")
    return Table("Step", columns, rows)


def better_peer(seconds: Mapping[str, list[float]]) -> str:
    """The peer with the smaller median."""
    return min(PEERS, key=lambda peer: summarize(seconds[peer]).median)


def over_peer(one: Found, arm: str) -> Ratio:
    """How many times faster than the better peer."""
    return ratio(one.seconds[better_peer(one.seconds)], one.seconds[arm])


def over_never(one: Found, arm: str) -> Ratio:
    """How many times faster than ours without padding."""
    return ratio(one.seconds[NEVER], one.seconds[arm])


def compile_overhead(one: Found) -> float:
    """The padding passes under "auto", as a share of the first step with "never"."""
    return (one.passes[AUTO] - one.passes[NEVER]) / one.first[NEVER]


def _ratios(found: Mapping[str, Found]) -> Table:
    rows = [
        (
            name,
            better_peer(one.seconds),
            *(str(over_peer(one, arm)) for arm in OURS),
            *(str(over_never(one, arm)) for arm in (AUTO, ALWAYS)),
        )
        for name, one in found.items()
    ]
    columns = ("model", "better peer", *OURS, "auto over never", "always over never")
    return Table("How many times faster than the better peer, and than never", columns, rows)


def _shares(found: Mapping[str, Found]) -> Table:
    rows = [
        (
            name,
            f"{one.before:.1%}",
            *(f"{one.shares[arm]:.1%}" for arm in (AUTO, ALWAYS)),
            f"{1e3 * one.passes[AUTO]:.0f}",
            f"{1e3 * one.passes[ALWAYS]:.0f}",
            f"{round(compile_overhead(one), 4) + 0.0:+.2%}",
        )
        for name, one in found.items()
    ]
    columns = (
        "model", "aligned as captured", "auto", "always", "passes of auto, ms",
        "passes of always, ms", "auto over never, of the first step",
    )  # fmt: skip
    return Table("FLOPs in aligned products, and what the passes take", columns, rows)


def _verdicts(found: Mapping[str, Found], device: torch.device) -> dict[str, bool]:
    verdicts = {}
    for name, one in found.items():
        if device.type == "cuda":
            fast = over_peer(one, AUTO).paired
            claim = f"{name}: auto at least {OVER_PEERS}x the better peer: {fast:.2f}x"
            verdicts[claim] = fast >= OVER_PEERS
            continue
        slower = 1 / over_never(one, AUTO).paired - 1
        claim = f"{name}: auto at most {OVERHEAD:.0%} slower than never: {slower:+.1%}"
        verdicts[claim] = slower <= OVERHEAD
        longer = compile_overhead(one)
        claim = f"{name}: auto's passes at most {OVERHEAD:.0%} of the first step: {longer:.2%}"
        verdicts[claim] = longer <= OVERHEAD
    return verdicts
