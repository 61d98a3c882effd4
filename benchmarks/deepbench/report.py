"""Ratios of the dtypes and of the sizes, measured and as the profile says; the slowest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from benchmarks.harness.ratios import ratio, summarize
from benchmarks.harness.report import Report, Table, plain, where

from .measure import ARMS, FULL, LOW, ODD, Found, Work, low_of

__all__ = ["make_report"]

CLEAR = 1.1
"""A difference from which on it matters which of two dtypes is chosen."""


def make_report(
    device: torch.device,
    work: Work,
    found: Mapping[str, Found],
    notes: Sequence[str],
    record: Mapping[str, str],
) -> Report:
    """The whole report; `record` says what was measured on, as `environment` does."""
    low = str(low_of(device)).removeprefix("torch.")
    how = (
        f"The low dtype is {low}. Times are medians [p10, p90] of {work.rounds} interleaved "
        "rounds. A ratio is the median over the rounds of the ratio within a round, with its 95% "
        "bootstrap interval. A call that takes ten times as long as the fastest was timed once."
    )
    return Report(
        name=f"deepbench_{device.type}",
        title=f"DeepBench's shapes, {low} against FP32, on {where(device)}",
        notes=[*notes, how],
        tables=[_ratios(found), _times(found)],
        verdicts=_verdicts(found),
        data={"rounds": work.rounds, "shapes": plain(found)},
        environment=record,
    )


def _gain(one: Found, base: str, arm: str) -> float:
    """How many times faster `arm` is than `base`."""
    if base in one.seconds and arm in one.seconds:
        return ratio(one.seconds[base], one.seconds[arm]).paired
    return _seconds(one, base) / _seconds(one, arm)


def _seconds(one: Found, arm: str) -> float:
    return one.left_out[arm] if arm in one.left_out else summarize(one.seconds[arm]).median


def _told(one: Found, base: str, arm: str) -> float | None:
    """What the profile says that `_gain` is."""
    before, after = one.predicted[base], one.predicted[arm]
    return None if before is None or after is None else before / after


def _ratios(found: Mapping[str, Found]) -> Table:
    pairs = ((FULL, LOW), (ODD + FULL, ODD + LOW), (ODD + LOW, LOW), (ODD + FULL, FULL))
    columns = ["shape"]
    for base, arm in pairs:
        columns += [f"{arm} over {base}", "profile"]
    rows = [
        (name, *(cell for pair in pairs for cell in _cells(one, *pair)))
        for name, one in sorted(found.items(), key=lambda item: _gain(item[1], FULL, LOW))
    ]
    return Table("How many times faster", tuple(columns), rows)


def _cells(one: Found, base: str, arm: str) -> tuple[str, str]:
    told = _told(one, base, arm)
    known = base in one.seconds and arm in one.seconds
    gain = str(ratio(one.seconds[base], one.seconds[arm])) if known else (
        f"{_gain(one, base, arm):.2f}x"
    )  # fmt: skip
    return gain, "" if told is None else f"{told:.2f}x"


def _times(found: Mapping[str, Found]) -> Table:
    rows = [
        (name, *(_time(one, arm) for arm in ARMS))
        for name, one in found.items()
    ]  # fmt: skip
    return Table("A forward and its backward, ms", ("shape", *ARMS), rows)


def _time(one: Found, arm: str) -> str:
    if arm in one.left_out:
        return f"{1e3 * one.left_out[arm]:.1f}, once"
    return summarize(one.seconds[arm]).text(digits=2)


def _verdicts(found: Mapping[str, Found]) -> dict[str, bool]:
    """Where it matters, the profile chooses the dtype that is faster."""
    verdicts = {}
    for name, one in found.items():
        told, gain = _told(one, FULL, LOW), _gain(one, FULL, LOW)
        if told is not None and not 1 / CLEAR < gain < CLEAR:
            numbers = f"{gain:.2f}x, it says {told:.2f}x"
            claim = f"{name}: the profile names the faster dtype: {numbers}"
            verdicts[claim] = (told > 1) == (gain > 1)
    return verdicts
