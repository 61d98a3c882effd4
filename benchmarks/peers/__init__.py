"""The papers' tasks, a whole training step: time and bytes against every peer.

The tasks are those of the `papers` benchmark, each with its own loop: forward, loss, backward,
clipping where it clips, the optimizer's step. The peers are plain PyTorch, eager and under
`torch.compile`, in FP32 and under autocast, with fused optimizers and with a GradScaler where the
low dtype is FP16; and torch.compile with an activation_memory_budget of 0.5. The low dtype is BF16
on a CPU, where mpcompile runs with `dtype="auto"`, and FP16 elsewhere. O1 has the same plain fused
optimizer as the peers, O2 an `MPOptimizer`. `mpcompile(step)` can't compile two of the steps as a
whole, Deep Speech 2's (its CTC loss) and the big LSTM's (projections): they run in pieces there.

Bytes saved for the backward are those that autograd holds after the forwards of a step. The peak
is the most that a step adds to what lies there between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from benchmarks.harness.report import Report, Settings, Table, paragraphs, plain, where
from benchmarks.harness.timing import Ratio, how_compared, ratio, summarize
from benchmarks.peers.measure import (
    AUTOCAST,
    BUDGETED,
    COMPILED,
    FULL,
    OURS,
    PEERS,
    QUICK,
    RECOMPUTES,
    RERUN,
    Row,
    Work,
    measure_all,
)


def run(settings: Settings) -> Report:
    """Measure everything; under `settings.quick` two rounds, without compiling."""
    return _measured(QUICK if settings.quick else FULL, settings.device)


def rerun(device: torch.device) -> Report:
    """A few tasks that are compiled fast, to be held against the committed ratios."""
    return _measured(RERUN, device)


def _measured(work: Work, device: torch.device) -> Report:
    rows = measure_all(work, device)
    title = f"Every peer on the papers' tasks, on {where(device)}"
    return make_report(title, work, rows, paragraphs(__doc__))


# -- report ----------------------------------------------------------------------------------------
# Ratios to each peer, the losing rows first; geometric means; bytes.

MEAN, LEAST = 1.2, 0.97
"""What is asked of the geometric mean over compile + autocast, and of each row."""


def make_report(
    title: str,
    work: Work,
    rows: Mapping[str, Row],
    notes: Sequence[str],
    asked: tuple[float, float] | None = (MEAN, LEAST),
) -> Report:
    """The whole report.

    Args:
        asked: of the geometric mean, and of each row; None: nothing is.
    """
    units = all(AUTOCAST in row.seconds for row in rows.values())
    base = AUTOCAST if units else COMPILED
    ratios = {
        name: {f"{ours} over {peer}": ratio(row.seconds[peer], row.seconds[ours])
               for ours in OURS for peer in PEERS if row.seconds.keys() >= {ours, peer}}
        for name, row in rows.items()
    }  # fmt: skip
    left_out = [
        f"{name}: {way} is left out: {why}."
        for name, row in rows.items()
        for way, why in row.left_out.items()
    ]
    how = f"All arms of a task in one process. {how_compared(work.rounds)} MB are 10^6 bytes."
    return Report(
        title=title,
        notes=[*notes, how, *left_out],
        tables=[
            _means(rows),
            *(_ratios(ratios, ours, _peers(rows)) for ours in OURS),
            _times(rows),
            _bytes(rows),
            _firsts(rows),
        ],
        verdicts=_verdicts(rows, ratios, base, *asked) if asked else {},
        data={"rounds": work.rounds, "rows": plain(rows), "ratios": plain(ratios)},
    )  # fmt: skip


def geometric_mean(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], resamples: int = 2000
) -> tuple[float, float, float]:
    """(mean, low, high) over tasks of the median over rounds of peer/ours.

    Args:
        pairs: of each task the peer's samples and ours, in the same rounds.
        resamples: of each task's rounds, drawn with replacement; low and high hold 95% of them.
    """
    generator = np.random.default_rng(0)
    logs, drawn = [], []
    for peer, ours in pairs:
        paired = np.log(np.asarray(peer, dtype=np.float64) / np.asarray(ours, dtype=np.float64))
        logs.append(np.median(paired))
        chosen = generator.integers(len(paired), size=(resamples, len(paired)))
        drawn.append(np.median(paired[chosen], axis=1))
    low, high = np.percentile(np.mean(drawn, axis=0), [2.5, 97.5])
    return float(np.exp(np.mean(logs))), float(np.exp(low)), float(np.exp(high))


def _over(rows: Mapping[str, Row], ours: str, peer: str) -> tuple[float, float, float] | None:
    timed = [row.seconds for row in rows.values() if peer in row.seconds]
    if any(ours not in seconds for seconds in timed):
        return None  # a mean over fewer tasks is no mean over the tasks
    pairs = [(seconds[peer], seconds[ours]) for seconds in timed]
    return geometric_mean(pairs) if pairs else None


def _peers(rows: Mapping[str, Row]) -> list[str]:
    """Those that were measured."""
    return [peer for peer in PEERS if any(peer in row.seconds for row in rows.values())]


def _means(rows: Mapping[str, Row]) -> Table:
    lines = []
    for peer in _peers(rows):
        cells = []
        for ours in OURS:
            found = _over(rows, ours, peer)
            cells.append("{:.2f}x [{:.2f}, {:.2f}]".format(*found) if found else "")
        lines.append((peer, str(sum(peer in row.seconds for row in rows.values())), *cells))
    return Table("Geometric mean over the tasks", ("over", "tasks", *OURS), lines)


def _ratios(ratios: Mapping[str, Mapping[str, Ratio]], ours: str, peers: Sequence[str]) -> Table:
    """The rows that lose most first."""

    def over(name: str, peer: str) -> Ratio | None:
        return ratios[name].get(f"{ours} over {peer}")

    def least(name: str) -> float:
        first = over(name, AUTOCAST) or over(name, COMPILED)
        return first.paired if first else 0.0

    lines = [
        (name, *(str(over(name, peer) or "") for peer in peers))
        for name in sorted(ratios, key=least)
    ]
    return Table(f"{ours}: how many times faster", ("task", *peers), lines)


def _times(rows: Mapping[str, Row]) -> Table:
    arms = (*_peers(rows), *OURS)
    lines = [
        (name, *(summarize(row.seconds[way]).text(digits=2) if way in row.seconds else ""
                 for way in arms))
        for name, row in rows.items()
    ]  # fmt: skip
    return Table("A step, ms", ("task", *arms), lines)


def _bytes(rows: Mapping[str, Row]) -> Table:
    lines = []
    for name, row in rows.items():
        for way in (COMPILED, AUTOCAST, BUDGETED, *OURS, RECOMPUTES):
            if way in row.saved:
                counted = (row.saved[way], row.peak[way], row.state[way])
                lines.append((name, way, *(f"{count / 1e6:.2f}" for count in counted)))
    columns = ("task", "arm", "saved for the backward, MB", "peak of a step, MB",
               "optimizer's state and working copies, MB")  # fmt: skip
    return Table("Bytes", columns, lines)


def _firsts(rows: Mapping[str, Row]) -> Table:
    arms = [way for way in (*PEERS, *OURS) if any(way in row.first for row in rows.values())]
    lines = [
        (name, *(f"{row.first[way]:.1f}" if way in row.first else "" for way in arms))
        for name, row in rows.items()
    ]
    return Table("The first step, which compiles, s", ("task", *arms), lines)


def _verdicts(
    rows: Mapping[str, Row],
    ratios: Mapping[str, Mapping[str, Ratio]],
    base: str,
    mean: float,
    least: float,
) -> dict[str, bool]:
    verdicts = {}
    for ours in OURS:
        found = _over(rows, ours, base)
        if base == AUTOCAST and found:
            claim = f"{ours}: geometric mean at least {mean}x {base}: {found[0]:.2f}x"
            verdicts[claim] = found[0] >= mean
        for name, row in ratios.items():
            if (found_here := row.get(f"{ours} over {base}")) is not None:
                one = found_here.paired
                verdicts[f"{ours}, {name}: at least {least}x {base}: {one:.2f}x"] = one >= least
    return verdicts
