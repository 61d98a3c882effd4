"""Ratios, verdicts and tables of what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from benchmarks.harness.ratios import Ratio, ratio, summarize
from benchmarks.harness.report import Report, Table, plain, where

from .arms import AUTOCAST, FP32, OURS, Work
from .measure import Measured

__all__ = ["make_report", "verdicts"]

OVER_AUTOCAST = 1.25
OVER_FP32 = 2.0
KEEPS = 0.97  # of compile FP32's speed, where "auto" found nothing that would be faster low
SHARE = 0.10
WARM = 1.05


def make_report(
    work: Work, device: torch.device, found: Measured, record: Mapping[str, str]
) -> Report:
    """The whole report; `record` says what was measured on, as `environment` does."""
    times = {"forward + backward": found.backward, "with AdamW": found.update}
    ratios = {
        label: {
            f"{ours} over {base}": ratio(samples[base], samples[ours])
            for ours, base in work.pairs
            if base in samples
        }
        for label, samples in times.items()
    }
    told = [f"{name} takes {s:.1f} s a step here: left out." for name, s in found.slow.items()]
    return Report(
        name=f"gpt_{device.type}",
        title=f"GPT training step in BF16 on {where(device)}",
        notes=[*_notes(work), *told],
        tables=[
            _step_table(found),
            _ratio_table(ratios),
            *([_start_table(found.starts)] if found.starts else []),
        ],
        verdicts=verdicts(ratios["forward + backward"], found.starts, found.lowered),
        data={
            "work": plain(work),
            "first_loss": found.losses,
            "saved_bytes": found.saved,
            "seconds_per_step": times,
            "ratios": plain(ratios),
            "starts": found.starts,
        },
        environment=record,
    )


def _notes(work: Work) -> list[str]:
    size = work.model
    return [
        f"{size.layers} pre-norm layers, width {size.width}, {size.heads} heads, vocabulary "
        f"{size.vocab}, {work.batch} sequences of {size.context} tokens; the loss is inside the "
        f"compiled function. Median [p10, p90] of {work.rounds} interleaved rounds of {work.steps} "
        "steps. Saved: what autograd keeps between forward and backward. A ratio is the median "
        "over the rounds of the ratio within a round, with its 95% bootstrap interval; above 1, "
        "mpcompile is faster.",
        "Starts are fresh processes, timed from the compiling call to the end of the first step. "
        "Passes: our capture and passes, as a share of the cold start. CPU seconds are the "
        "process's own and see less of what else runs on the machine.",
    ]


def _step_table(found: Measured) -> Table:
    return Table(
        "Step",
        ("arm", "forward + backward, ms", "with AdamW, ms", "saved, MiB", "first loss"),
        [
            (
                name,
                summarize(samples).text(),
                summarize(found.update[name]).text(),
                f"{found.saved[name] / 2**20:.1f}",
                f"{found.losses[name]:.4f}",
            )
            for name, samples in found.backward.items()
        ],
    )


def _ratio_table(ratios: dict[str, dict[str, Ratio]]) -> Table:
    labels = list(ratios)
    return Table(
        "How many times faster",
        ("", *(f"{label}{what}" for label in labels for what in ("", ", of medians"))),
        [
            (
                name,
                *(
                    cell
                    for label in labels
                    for value in [ratios[label][name]]
                    for cell in (str(value), f"{value.of_medians:.2f}x")
                ),
            )
            for name in ratios[labels[0]]
        ],
    )


def _start_table(starts: dict[str, dict[str, Any]]) -> Table:
    def warm(name: str, key: str) -> str:
        return summarize([s[key] for s in starts[name]["warm"]]).text(unit=1, digits=2)

    return Table(
        "Start of a fresh process",
        ("arm", "cold, s", "passes in it, s", "share", "warm, s", "warm, CPU s", "cache hits"),
        [
            (
                name,
                f"{start['cold']['seconds']:.1f}",
                f"{start['cold']['passes']:.2f}" if name in OURS else "-",
                f"{_share(start):.1%}" if name in OURS else "-",
                warm(name, "seconds"),
                warm(name, "cpu_seconds"),
                f"{sum(s['cache_hits'] > 0 for s in start['warm'])} of {len(start['warm'])}",
            )
            for name, start in starts.items()
        ],
    )


def _share(start: dict[str, Any]) -> float:
    return float(start["cold"]["passes"] / start["cold"]["seconds"])


def _warm_ratio(starts: dict[str, dict[str, Any]], ours: str) -> float:
    """Our median warm start over that of torch.compile in FP32; above 1 is slower."""
    ours_s, plain_s = (median(s["seconds"] for s in starts[n]["warm"]) for n in (ours, FP32))
    return float(ours_s / plain_s)


def verdicts(
    ratios: dict[str, Ratio], starts: dict[str, dict[str, Any]], lowered: dict[str, bool]
) -> dict[str, bool]:
    """Ours over the peers, as far as these were timed; and the starts."""
    found = {}
    for ours in OURS:
        full = OVER_FP32 if lowered[ours] else KEEPS
        for base, target in ((AUTOCAST, OVER_AUTOCAST), (FP32, full)):
            if value := ratios.get(f"{ours} over {base}"):
                claim = f"{ours} at least {target}x the speed of {base}: {value.paired:.2f}x"
                found[claim] = value.paired >= target
    for ours in OURS if starts else ():
        share, warm = _share(starts[ours]), _warm_ratio(starts, ours)
        claim = f"{ours}: passes at most {SHARE:.0%} of the cold start: {share:.1%}"
        found[claim] = share <= SHARE
        found[f"{ours}: warm start within {WARM}x of {FP32}: {warm:.2f}x"] = warm <= WARM
    return found
