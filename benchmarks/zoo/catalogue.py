"""Models measured in other processes, each row kept as soon as it is there."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import calls_elsewhere
from benchmarks.harness.report import SCRATCH, commit
from benchmarks.zoo.hugging_face import HUGGING_FACE
from benchmarks.zoo.timm_models import TIMM

LIBRARIES = {"transformers": HUGGING_FACE, "timm": TIMM}
"""Every architecture of the zoo, by library and name."""

_ENVIRONMENT = {
    "MPCOMPILE_PROFILE": "none",  # a profile may leave small products in FP32
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}
_PIECE = 12
"""Models in one process: libraries are imported once for them, memory is given back after them."""


def rows_of(draws: int, few: Collection[str], *, quick: bool) -> list[dict[str, Any]]:
    """Rows of all models of those libraries that are installed, kept in `benchmarks/scratch/` as
    they come; `quick`: of `few` of them, drawn once.
    """
    there = [library for library in LIBRARIES if importlib.util.find_spec(library)]
    names = [f"{library}/{name}" for library in there for name in LIBRARIES[library]]
    if quick:
        return measure_each([name for name in names if name in few], 1)
    return measure_each(names, draws, kept=SCRATCH / "zoo_rows.jsonl", commit=commit())


def measure_each(
    names: Sequence[str],
    draws: int,
    *,
    kept: Path | None = None,
    commit: str = "",
    function: str = "benchmarks.zoo.measure:measure",
) -> list[dict[str, Any]]:
    """Rows as `zoo.measure.measure`, or another function, makes them; one at which its process
    died has `died` instead of `arms`.

    Args:
        names: as "timm/swin".
        draws: of weights and batch, for each model.
        kept: a file to which each row is added at once. Rows in it that were measured with as many
            draws at the same `commit`, without uncommitted changes, are not measured again.
        commit: what is measured.
        function: of a name and the number of draws; it returns the row.
    """
    stamp = {"commit": commit, "draws": draws}
    rows = _known(kept, stamp)

    def fill(missing: list[str]) -> None:
        while missing:
            for row in _measured(missing, draws, function):
                rows[row["name"]] = row
                missing.remove(row["name"])
                if kept:
                    _append(kept, {"stamp": stamp, "row": row})

    missing = [name for name in names if name not in rows]
    pieces = [missing[start : start + _PIECE] for start in range(0, len(missing), _PIECE)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill, pieces))
    return [rows[name] for name in names]


def _append(path: Path, line: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:  # one write, so that lines of two threads don't mix
        file.write(json.dumps(line) + "\n")


def _known(kept: Path | None, stamp: dict[str, Any]) -> dict[str, dict[str, Any]]:
    if kept is None or not kept.exists() or stamp["commit"].endswith("+changes"):
        return {}
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    return {line["row"]["name"]: line["row"] for line in lines if line["stamp"] == stamp}


def _measured(names: Sequence[str], draws: int, function: str) -> Iterator[dict[str, Any]]:
    """Rows, in this order, up to the first at which the process dies."""
    waiting = list(names)
    try:
        for row in calls_elsewhere(function, [(name, draws) for name in names], _ENVIRONMENT):
            print(waiting.pop(0), file=sys.stderr, flush=True)
            yield row
    except RuntimeError as error:
        died = str(error).splitlines()[0].removeprefix(f"{function}: ").rstrip(":")
        yield {"name": waiting[0], "died": died}
