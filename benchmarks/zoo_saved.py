"""What each model of the zoo keeps between forward and backward, beside compile + autocast.

The models are those of `zoo`, with their odd and small sizes; each computes its own loss, as a loop
does that drops what else the model returns. The low dtype is BF16. Counted are the bytes that
saved-tensor hooks of autograd see when the programs that torch.compile parts run op by op: each
storage once, the values that one graph hands to the next among them; not the parameters, buffers
and the batch. mpcompile plans as for a GPU that has a kernel for everything, with a plain
optimizer; the peer is traced on the CPU, whose autocast runs norms and softmax low where a GPU's
keeps them in FP32.

*Casts* are low copies of weights and of the batch, which a step of any batch holds once. The
columns without them say what remains when the batch is large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.harness.record import environment
from benchmarks.harness.report import SCRATCH, Report, Settings, Table, paragraphs

from .zoo.arms import BOTH, LEVELS
from .zoo.pieces import installed, measure_each
from .zoo.report import LEAST
from .zoo.saved import share

__all__ = ["DEVICES", "make_report", "run"]

DEVICES = ("cpu",)
QUICK = ("transformers/gpt2", "timm/vit_tiny")
O2_MEDIAN = 0.85
_SAME = 1.005
"""Up to here a level keeps as much as the peer: they differ in statistics of single norms."""


def run(settings: Settings) -> Report:
    """Count every model; under `settings.quick` two. Rows are kept as those of `zoo` are."""
    record = environment(settings.device)
    names = installed(LEAST)
    if settings.quick:
        rows = measure_each([name for name in names if name in QUICK], 1, module="saved")
    else:
        kept = SCRATCH / "zoo_saved_rows.jsonl"
        rows = measure_each(names, 1, kept=kept, commit=record["commit"], module="saved")
    return make_report(f"zoo_saved_{settings.device.type}", rows, record)


def make_report(name: str, rows: Sequence[Mapping[str, Any]], record: Mapping[str, str]) -> Report:
    """The whole report; `record` says what was measured on, as `environment` does."""
    return Report(
        name=name,
        title="A zoo of architectures: bytes kept for the backward",
        notes=paragraphs(__doc__),
        tables=[*(_table(library, rows) for library in LEAST), *_beyond(rows)],
        verdicts=_verdicts(rows),
        data={"rows": list(rows)},
        environment=record,
    )


def _table(library: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("model", "kind", f"{BOTH}, KB", "of it casts", *LEVELS,
               *(f"{level}, without casts" for level in LEVELS))  # fmt: skip

    def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
        peer = row.get("saved", {}).get(BOTH, {})
        sizes = [f"{peer[size] / 1e3:.1f}" if size in peer else "-" for size in ("held", "casts")]
        shares = [share(row, level, casts=casts) for casts in (True, False) for level in LEVELS]
        ratios = ["-" if ratio is None else f"{ratio:.2f}x" for ratio in shares]
        return (row["name"].partition("/")[2], row.get("kind", "-"), *sizes, *ratios)

    found = [row for row in rows if row["name"].startswith(f"{library}/")]
    return Table(library, columns, [cells(row) for row in found])


def _beyond(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """What levels keep beyond the peer, casts aside; and ways that fail."""
    found = []
    for row in rows:
        for level in LEVELS:
            ratio = share(row, level, casts=False)
            if ratio is not None and ratio > _SAME:
                most = [f"{size / 1e3:+.1f} KB {dtype}: {op}"
                        for size, dtype, op in row["saved"][level]["more"] if size > 0]  # fmt: skip
                found.append((row["name"], f"{level}: {ratio:.2f}x", "; ".join(most[:2])))
        for way, side in row.get("saved", {}).items():
            if "failed" in side:
                found.append((row["name"], way, side["failed"]))
        if "died" in row:
            found.append((row["name"], "all", row["died"]))
    columns = ("model", "where", "what")
    return [Table("Kept beyond the peer, without casts, or not counted", columns, found)]


def _verdicts(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    verdicts = {}
    for casts in (True, False):
        what = "" if casts else ", without casts"
        for level in LEVELS:
            known = [ratio for row in rows
                     if (ratio := share(row, level, casts=casts)) is not None]  # fmt: skip
            fine = sum(ratio <= _SAME for ratio in known)
            claim = f"{level} keeps no more than {BOTH}{what}: {fine} of {len(known)}"
            verdicts[claim] = fine == len(known)
        if known:
            middle = median(known)
            claim = f"O2 keeps at most {O2_MEDIAN:.2f}x in the median{what}: {middle:.2f}x"
            verdicts[claim] = middle <= O2_MEDIAN
    return verdicts
