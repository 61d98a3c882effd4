"""A rerun against what is committed: which ratios fell by more than noise."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.report import RESULTS, Report
from benchmarks.harness.timing import Ratio

NOISE = 0.1
"""Two runs of the same code on an idle machine differ by less than this share of a ratio."""

ATTEMPTS = 3
"""A ratio has fallen if it is too low in all of them: a busy machine makes other ones low each
time."""

ALIKE = ("name", "matrix units", "threads")
"""What two environments must have in common for their ratios to be comparable."""


@dataclasses.dataclass(frozen=True)
class Checked:
    """What came of a rerun.

    Attributes:
        found, before: ratios here and in the committed report; only those that both have.
        fallen: the names of those that are lower in every attempt.
    """

    found: dict[str, Ratio]
    before: dict[str, Ratio]
    fallen: list[str]


def committed(name: str, record: Mapping[str, str], results: Path = RESULTS) -> Any:
    """The committed report of this name, as JSON, from a machine like that of `record`; or None."""
    for file in sorted(results.rglob(f"{name}.json")):
        data = json.loads(file.read_text())
        if all(data["environment"].get(key) == record.get(key) for key in ALIKE):
            return data
    return None


def ratios_of(data: Mapping[str, Any]) -> dict[str, Ratio]:
    """The ratios of a report: "row: arm over base" -> ratio. `data["ratios"]` is row -> pair ->
    ratio.
    """
    return {
        f"{row}: {pair}": Ratio(**values)
        for row, pairs in data["ratios"].items()
        for pair, values in pairs.items()
    }


def fallen(found: Mapping[str, Ratio], before: Mapping[str, Ratio]) -> set[str]:
    """Those whose whole interval lies below the committed one, less noise."""
    return {
        name
        for name in found.keys() & before.keys()
        if found[name].high < (1 - NOISE) * before[name].low
    }


def check(
    rerun: Callable[[], Report], before: Mapping[str, Ratio], *, attempts: int = ATTEMPTS
) -> Checked:
    """Run until nothing is left that has been too low in every attempt, or attempts are over."""
    low = set(before)
    found: dict[str, Ratio] = {}
    for _ in range(attempts):
        found = ratios_of(rerun().data)
        low &= fallen(found, before)
        if not low:
            break
    both = [name for name in found if name in before]
    return Checked({n: found[n] for n in both}, {n: before[n] for n in both}, sorted(low))
