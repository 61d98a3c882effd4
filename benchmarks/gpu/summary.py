"""What all pieces came to: a table for the console, `summary.md`, `summary.json`, one archive."""

from __future__ import annotations

import dataclasses
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

from .runner import Record

__all__ = ["ARCHIVE", "PACKAGES", "table", "write"]

ARCHIVE = "results.tar.gz"
"""Everything below `out` in one file, to take home."""

PACKAGES = "packages"
"""The folder of unpacked wheels, which is not taken home."""

_LONGEST = 100


def table(records: Sequence[Record], out: Path) -> str:
    """A row a piece, as a pipe table that reads as plain text, too."""
    rows = [("piece", "status", "seconds", "last line")]
    rows += [(r.name, r.status, f"{r.seconds:.0f}", _last_line(out / r.name)) for r in records]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]

    def line(row: tuple[str, str, str, str]) -> str:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        cells[2] = row[2].rjust(widths[2])
        return "| " + " | ".join(cells) + " |"

    first, second, _, last = ("-" * width for width in widths)
    rule = f"| {first} | {second} | {'-' * (widths[2] - 1)}: | {last} |"
    return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])


def write(records: Sequence[Record], out: Path) -> None:
    """Write all three files; they say what is known now, so write them after every piece."""
    versions = {line for record in records for line in _lines(record)}
    known = "\n".join(["# On a CUDA device", "", *sorted(versions), "", table(records, out), ""])
    (out / "summary.md").write_text(known)
    plain = [dataclasses.asdict(record) for record in records]
    (out / "summary.json").write_text(json.dumps(plain, indent=1) + "\n")
    with tarfile.open(out / ARCHIVE, "w:gz") as archive:
        for path in sorted(out.iterdir()):
            if path.name not in (ARCHIVE, PACKAGES):
                archive.add(path, path.name)


def _lines(record: Record) -> list[str]:
    """Two lines of one name: some pieces ran on another version."""
    return [f"- {name}: {version}" for name, version in record.versions.items()]


def _last_line(folder: Path) -> str:
    try:
        lines = (folder / "log.txt").read_text(errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return last.replace("|", "/").strip("=")[:_LONGEST].strip()
