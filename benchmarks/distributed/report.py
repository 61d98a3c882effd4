"""What each arm sends beside its peer, and verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.harness.report import Report, Table, plain

from .arms import ARMS, AUTOCAST, BUCKET, DDP, FSDP, OURS, Arm, Work
from .measure import RANKS, Counted

__all__ = ["make_report", "verdicts"]


def make_report(
    name: str,
    notes: Sequence[str],
    work: Work,
    found: Mapping[str, Counted],
    record: Mapping[str, str],
) -> Report:
    """The whole report; `record` says what was measured on, as `environment` does."""
    return Report(
        name=name,
        title="What a training step sends",
        notes=[*notes, *_notes(work)],
        tables=[_table(engine, clips, found) for engine in (DDP, FSDP) for clips in (False, True)],
        verdicts=verdicts(found),
        data={"counted": plain(found)},
        environment=record,
    )


def _notes(work: Work) -> list[str]:
    parameters = sum(p.numel() for p in work.model().parameters())
    return [
        f"For each step and each of {RANKS} ranks. The model has {parameters:,} parameters, "
        f"{4 * parameters / 1e6:.3f} MB in FP32; DDP's buckets are of {BUCKET} MB. MB are 10^6 "
        "bytes, and are what a rank sends where the ranks form a ring, as NCCL's do: for n ranks "
        "2(n - 1)/n of a tensor that is all-reduced, (n - 1)/n of one that is gathered or "
        "reduce-scattered. The number of DDP's buckets depends on the order in which gradients "
        "arrive, which may differ between an eager and a compiled model. The start is what the "
        f"first {work.warm} steps send beyond as many later ones.",
    ]


def _table(engine: str, clips: bool, found: Mapping[str, Counted]) -> Table:
    arms = [arm for arm in ARMS if (arm.engine, arm.clips) == (engine, clips)]
    peer = found[Arm(engine, AUTOCAST, clips).name]
    rows = []
    for arm in arms:
        counted = found[arm.name]
        rows.append((
            arm.way, str(len(counted.step)), f"{counted.sent / 1e6:.3f}",
            f"{counted.sent / peer.sent:.3f}x", _parts(counted), f"{counted.start:+d}",
        ))  # fmt: skip
    how = "the norm clipped" if clips else "no clipping"
    columns = ("arm", "collectives", "MB", "over the peer", "of which", "start")
    return Table(f"{engine}, {how}", columns, rows)


def _parts(counted: Counted) -> str:
    """What the step consists of: "4 all-reduce FP32 (3.714 MB)"."""
    kinds = Counter((c.kind, c.dtype) for c in counted.step)
    parts = []
    for (kind, dtype), times in sorted(kinds.items()):
        sent = sum(c.bytes for c in counted.step if (c.kind, c.dtype) == (kind, dtype))
        size = f"{sent / 1e6:.3f} MB" if sent >= 1000 else f"{sent:.0f} B"
        parts.append(f"{times} {kind} {dtype} ({size})")
    return ", ".join(parts)


def verdicts(found: Mapping[str, Counted]) -> dict[str, bool]:
    """Never more collectives or bytes than the peer."""
    result = {}
    for arm in ARMS:
        if arm.way not in OURS:
            continue
        counted, peer = found[arm.name], found[Arm(arm.engine, AUTOCAST, arm.clips).name]
        share = round(counted.sent / peer.sent, 3)
        fits = len(counted.step) <= len(peer.step) and share <= 1.0
        claim = f"{arm.name}: at most {len(peer.step)} collectives and 1x the bytes"
        result[f"{claim}: {len(counted.step)}, {share:.3f}x"] = fits
    return result
