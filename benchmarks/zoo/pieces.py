"""Each model measured in a process of its own, its row kept as soon as it is there."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import json_from_process

from .catalogue import LIBRARIES

__all__ = ["installed", "measure_each"]

_ENVIRONMENT = {
    "MPCOMPILE_PROFILE": "none",  # a profile may leave small products in FP32
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}


def installed() -> list[str]:
    """`library/model` of each library that is there."""
    there = [library for library in LIBRARIES if importlib.util.find_spec(library)]
    return [f"{library}/{name}" for library in there for name in LIBRARIES[library]]


def measure_each(
    names: Iterable[str], draws: int, *, kept: Path | None = None, commit: str = ""
) -> list[dict[str, Any]]:
    """Rows as `benchmarks/zoo/measure.py` makes them; one that died has `died` instead of `arms`.

    Args:
        names: as "timm/swin".
        draws: of weights and batch, for each model.
        kept: a file to which each row is added at once. Rows in it that were measured with as many
            draws at the same `commit`, without uncommitted changes, are not measured again.
        commit: what is measured.
    """
    stamp = {"commit": commit, "draws": draws}
    known = {}
    if kept and kept.exists() and not commit.endswith("+changes"):
        lines = [json.loads(line) for line in kept.read_text().splitlines()]
        known = {line["row"]["name"]: line["row"] for line in lines if line["stamp"] == stamp}
    rows = []
    for name in names:
        row = known.get(name) or _measured(name, draws)
        rows.append(row)
        if kept and name not in known:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with kept.open("a") as file:
                file.write(json.dumps({"stamp": stamp, "row": row}) + "\n")
        print(name, file=sys.stderr, flush=True)
    return rows


def _measured(name: str, draws: int) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json_from_process(
            "-m", "benchmarks.zoo.measure", name, str(draws), environment=_ENVIRONMENT
        )
    except RuntimeError as error:
        return {"name": name, "died": str(error).strip().splitlines()[-1]}
    return row
