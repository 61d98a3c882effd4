"""What a benchmark is given, and what it hands back: settings, tables, the files of a report.

`Report.write` leaves `<name>.json` (every sample) and `<name>.md` (the tables people read).
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import mpcompile
from mpcompile.devices.registry import capabilities

_BENCHMARKS = Path(__file__).resolve().parent.parent

RESULTS = _BENCHMARKS / "results"
"""Where the committed results are."""

SCRATCH = _BENCHMARKS / "scratch"
"""Where smoke tests leave theirs; git ignores it."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command line hands to every benchmark.

    Attributes:
        device: where to run.
        quick: the smallest run that goes through all the code; its numbers mean nothing.
    """

    device: torch.device
    quick: bool = False


def where(device: torch.device) -> str:
    """The device, in a title."""
    return "CUDA" if device.type == "cuda" else "the CPU"


def paragraphs(doc: str | None) -> list[str]:
    """What the docstring of a benchmark says below its summary, as notes for the report."""
    return (doc or "").strip().split("\n\n")[1:]


def plain(value: Any) -> Any:
    """The same for JSON: a dataclass, in mappings and sequences at any depth, becomes a dict."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


@dataclasses.dataclass(frozen=True)
class Table:
    """A table for people: the cells are text already."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """GitHub's pipe table, padded so that it reads as plain text too; numbers to the right."""
        grid = [list(self.columns), *(list(row) for row in self.rows)]
        widths = [max(len(row[i]) for row in grid) for i in range(len(self.columns))]

        def line(cells: Sequence[str]) -> str:
            first, *rest = (
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            return "| " + " | ".join([first, *rest]) + " |"

        rule = "|".join(
            "-" * (width + 2) if i == 0 else "-" * (width + 1) + ":"
            for i, width in enumerate(widths)
        )
        body = [line(grid[0]), f"|{rule}|", *(line(row) for row in grid[1:])]
        return "\n".join([f"### {self.title}", "", *body])


Claims = Iterator[tuple[str, bool]]
"""Verdicts, one by one: a claim, and whether the numbers bear it out."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What a benchmark found.

    Attributes:
        title: one line.
        notes: what was run and how to read it: one paragraph each.
        tables: for people.
        verdicts: claim -> whether these numbers bear it out.
        data: every number, as plain JSON data.
    """

    title: str
    notes: Sequence[str]
    tables: Sequence[Table]
    verdicts: Mapping[str, bool]
    data: Mapping[str, Any]

    def markdown(self, environment: Mapping[str, str]) -> str:
        verdicts = [f"- {'yes' if met else 'NO'}: {claim}" for claim, met in self.verdicts.items()]
        parts = [
            f"# {self.title}",
            "\n\n".join(self.notes),
            *(table.markdown() for table in self.tables),
            *(["### Targets\n\n" + "\n".join(verdicts)] if verdicts else []),
            "### Machine\n\n" + "\n".join(f"- {k}: {v}" for k, v in environment.items()),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def write(self, directory: Path, name: str, environment: Mapping[str, str]) -> list[Path]:
        """Write `<name>.md` and `<name>.json` into `directory`; return their paths.

        Args:
            environment: from the function of this name, as it was at the start.
        """
        directory.mkdir(parents=True, exist_ok=True)
        readable, complete = (directory / f"{name}.{end}" for end in ("md", "json"))
        readable.write_text(self.markdown(environment))
        record = {
            "name": name,
            "title": self.title,
            "environment": dict(environment),
            "verdicts": dict(self.verdicts),
            **self.data,
        }
        complete.write_text(json.dumps(record, indent=1) + "\n")
        return [readable, complete]


# -- record ----------------------------------------------------------------------------------------
# The machine and the versions that were measured.


def environment(device: torch.device) -> dict[str, str]:
    """Everything a reader needs to judge or repeat the numbers; no paths, no host names."""
    one = capabilities(device)
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
        "mpcompile": mpcompile.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(one.device),
        "name": _cpu_name() if device.type == "cpu" else one.name(),
        "instructions": ", ".join(_cpu_flags()),
        "matrix units": one.units(),
        "memory": one.memory_text(),
        **one.libraries(),
        **(_cuda_settings() if device.type == "cuda" else {}),
        "threads": str(torch.get_num_threads()),
        "load average at the start": f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} cores",
    }


def _cuda_settings() -> dict[str, str]:
    """What FP32 means there: torch allows TF32 in convolutions, and not in matrix products."""
    allowed = {
        "TF32 in matrix products": torch.backends.cuda.matmul.allow_tf32,
        "TF32 in convolutions": torch.backends.cudnn.allow_tf32,
    }
    return {what: "yes" if allow else "no" for what, allow in allowed.items()}


def _cpu_name() -> str:
    """The processor's own name; platform.processor() is empty on most Linux machines."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpu_flags() -> list[str]:
    """The vector and matrix instructions, out of the hundred flags a CPU has."""
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "asimd",
              "sve", "bf16", "sme")  # fmt: skip
    present = (_cpuinfo("flags") or _cpuinfo("Features") or "").split()
    return [flag for flag in wanted if flag in present]


def _cpuinfo(key: str) -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(key))
    return next(values, None)


def commit() -> str:
    """The commit that was measured; `+changes` where the working tree differs from it."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return "unknown"
