"""What every benchmark shares: arms timed in turns, robust statistics, the record, the report.

Machines drift: clocks, caches, other processes. So the arms of a comparison take turns in one
process, round after round, and the figure that counts is the median over the rounds of the ratio
*within* a round; whatever slows a whole round down cancels. Medians and percentiles, never means.

`Report.write` leaves `<name>.json` (every sample) and `<name>.md` (the tables people read).
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mpcompile
from mpcompile.devices.facts import device_facts

__all__ = [
    "RESULTS",
    "SCRATCH",
    "Arm",
    "Ratio",
    "Report",
    "Settings",
    "Summary",
    "Table",
    "environment",
    "far_behind",
    "idle_wait",
    "low_dtype",
    "ratio",
    "summarize",
    "take_turns",
]

RESULTS = Path(__file__).parent / "results"
"""Where the committed results are."""

SCRATCH = Path(__file__).parent / "scratch"
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

    @property
    def where(self) -> str:
        """The device, in a title."""
        return "CUDA" if self.device.type == "cuda" else "the CPU"


# -- timing ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Arm:
    """One side of a comparison: a name, and one step of the work to time."""

    name: str
    step: Callable[[], object]


def take_turns(
    arms: Sequence[Arm],
    *,
    rounds: int,
    steps: int = 4,
    settle: int = 1,
    wait: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time the arms in interleaved rounds: one sample per arm and round, in seconds per step.

    A turn is `settle` steps that do not count (caches hold another arm's data), then `steps` timed
    together. Each round starts with another arm, so that none always follows the same one. Compile
    and warm up before: every step here counts.

    Args:
        wait: blocks until the device is idle; called at both ends of the timed part.
        clock: seconds, monotonic.
    """
    samples: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for turn in range(rounds):
        first = turn % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            for _ in range(settle):
                arm.step()
            wait()
            start = clock()
            for _ in range(steps):
                arm.step()
            wait()
            samples[arm.name].append((clock() - start) / steps)
    return samples


def far_behind(
    arms: Sequence[Arm],
    *,
    wait: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """The arms that are not worth many rounds: name -> seconds of one step.

    They take ten times as long as the fastest, or longer: torch's BF16 products on a CPU without
    instructions for them do. One step says as much as a hundred. Compile and warm up before.
    """
    seconds = {}
    for arm in arms:
        wait()
        start = clock()
        arm.step()
        wait()
        seconds[arm.name] = clock() - start
    return {name: s for name, s in seconds.items() if s >= 10 * min(seconds.values())}


def low_dtype(device: torch.device) -> torch.dtype | str:
    """What a user would ask for: on a CPU "auto", which may find that nothing low is faster."""
    return "auto" if device.type == "cpu" else torch.bfloat16


def idle_wait(device: torch.device) -> Callable[[], None]:
    """What `take_turns(wait=...)` needs on this device."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


# -- statistics -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Summary:
    """Median, 10th and 90th percentile, in the samples' unit."""

    median: float
    p10: float
    p90: float


def summarize(samples: Sequence[float]) -> Summary:
    p10, median, p90 = np.percentile(np.asarray(samples, dtype=np.float64), [10, 50, 90])
    return Summary(float(median), float(p10), float(p90))


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times faster one arm is than its baseline; above 1 is faster.

    Attributes:
        of_medians: the baseline's median time over the arm's.
        paired: median over the rounds of (baseline's time / arm's time) within the round.
        low, high: 95% bootstrap interval of `paired`: rounds drawn with replacement.
    """

    of_medians: float
    paired: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.paired:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def ratio(
    baseline: Sequence[float], arm: Sequence[float], *, resamples: int = 2000, seed: int = 0
) -> Ratio:
    """Compare two arms of the same rounds.

    Raises:
        ValueError: the arms have different numbers of samples, or none.
    """
    if len(baseline) != len(arm) or not len(arm):
        raise ValueError(f"arms of the same rounds are needed, got {len(baseline)} and {len(arm)}")
    base, ours = (np.asarray(x, dtype=np.float64) for x in (baseline, arm))
    paired = base / ours
    draws = np.random.default_rng(seed).integers(len(paired), size=(resamples, len(paired)))
    low, high = np.percentile(np.median(paired[draws], axis=1), [2.5, 97.5])
    return Ratio(
        of_medians=float(np.median(base) / np.median(ours)),
        paired=float(np.median(paired)),
        low=float(low),
        high=float(high),
    )


# -- the record -----------------------------------------------------------------------------------


def environment(device: torch.device) -> dict[str, str]:
    """Everything a reader needs to judge or repeat the numbers; no paths, no host names."""
    facts = device_facts(device)
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "mpcompile": mpcompile.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": facts.device,
        "name": _cpu_name() if device.type == "cpu" else facts.name,
        "instructions": ", ".join(_cpu_flags()),
        "matrix units": facts.matrix_units,
        "memory": facts.memory,
        **facts.libraries,
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


def _commit() -> str:
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


# -- the report -----------------------------------------------------------------------------------


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


@dataclasses.dataclass(frozen=True)
class Report:
    """What a benchmark found.

    Attributes:
        name: the benchmark's, and the stem of the files.
        title: one line.
        notes: what was run and how to read it: one paragraph each.
        tables: for people.
        verdicts: claim -> whether these numbers bear it out.
        data: every number, as plain JSON data.
        environment: from `environment`.
    """

    name: str
    title: str
    notes: Sequence[str]
    tables: Sequence[Table]
    verdicts: Mapping[str, bool]
    data: Mapping[str, Any]
    environment: Mapping[str, str]

    def markdown(self) -> str:
        verdicts = [f"- {'yes' if met else 'NO'}: {claim}" for claim, met in self.verdicts.items()]
        parts = [
            f"# {self.title}",
            "\n\n".join(self.notes),
            *(table.markdown() for table in self.tables),
            *(["### Targets\n\n" + "\n".join(verdicts)] if verdicts else []),
            "### Machine\n\n" + "\n".join(f"- {k}: {v}" for k, v in self.environment.items()),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def write(self, directory: Path) -> list[Path]:
        """Write `<name>.md` and `<name>.json` into `directory`; return their paths."""
        directory.mkdir(parents=True, exist_ok=True)
        readable, complete = (directory / f"{self.name}.{end}" for end in ("md", "json"))
        readable.write_text(self.markdown())
        record = {
            "name": self.name,
            "title": self.title,
            "environment": dict(self.environment),
            "verdicts": dict(self.verdicts),
            **self.data,
        }
        complete.write_text(json.dumps(record, indent=1) + "\n")
        return [readable, complete]
