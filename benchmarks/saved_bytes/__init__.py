"""Bytes kept between forward and backward, counted in the programs that torch.compile parts.

Every arm goes the way it goes in training: Dynamo, AOTAutograd, Inductor's passes on the joint
graph and its min-cut partitioner. Only code generation is left out: in its place stands a function
that reads from the partitioned forward what it hands to the backward. So a model of any size is
counted in seconds; its parameters are memory that nothing touches, its activations are never
allocated.

What is counted: see `mpcompile/plans/partitioned.py`. A model in half precision has its low
weights as parameters, which exist anyway. A copy of an input that the graph makes itself (a weight
cast to the low dtype) does count, and has a column of its own.

Without a GPU, peers are traced on the CPU, and our passes plan as for a GPU that has a kernel for
everything: a CPU's plan is another one (its attention is written out, for one thing), made for the
CPU's speed. What remains different: padding, and whatever else needs a GPU to be asked.

For a GPT small enough to run, the same arms run op by op as well, and saved-tensor hooks say what
autograd really holds.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence

import torch

from benchmarks.harness.report import Claims, Report, Settings, Table, plain
from benchmarks.saved_bytes.count import (
    AUTOCAST,
    BUDGET,
    HALF,
    O1,
    O2,
    STEPPED,
    TINY,
    WITH_HEAD,
    Work,
    count_all,
)
from mpcompile.plans.partitioned import Saved


def run(settings: Settings) -> Report:
    """Count everything; under `settings.quick` tiny models."""
    device = settings.device
    work = TINY if settings.quick else Work()
    saved, held = count_all(work, device)
    return Report(
        title="Bytes saved for backward",
        notes=_notes(device),
        tables=[
            *(
                _table(name, found, held if name == work.small.name else None)
                for name, found in saved.items()
            ),
            *(table for name, found in saved.items() for table in _lists(name, found)),
        ],
        verdicts=dict(_verdicts(work, saved, held)),
        data={
            "bytes": {
                name: {way: totals(found) for way, found in ways.items()}
                for name, ways in saved.items()
            },
            "held_by_autograd": held,
            "saved": {
                name: {way: plain(groups(found)) for way, found in ways.items()}
                for name, ways in saved.items()
            },
        },
    )


# -- report ----------------------------------------------------------------------------------------
# Totals beside those of pure half, what makes up the difference, and verdicts.

OVER_HALF = 1.02
FULL_SHARE = 0.01
FUSED_OVER_AUTOCAST = 0.5
LISTED = 0.002


def _notes(device: torch.device) -> list[str]:
    return [
        "GB are 10^9 bytes. Counted in the forward that torch.compile's partitioner makes, before "
        "code generation: each tensor returned for the backward's sake, once for each storage; "
        "inputs of the graph (parameters, buffers, the batch, an MPOptimizer's low copies) do not "
        "count. Copies of inputs, such as a weight cast to the low dtype, are part of the total. "
        "The low dtype is BF16; pure half is the model and its images in it, compiled.",
        f"Traced on {device.type}"
        + (", with mpcompile's passes told that it is a GPU." if device.type == "cpu" else ".")
        + " No dropout, whose masks every arm would keep. Budget: the partitioner's "
        "activation_memory_budget. Recompute: `recompute=True`, and for the peer the setting of "
        "torch's own partitioner that it stands for (ban_recompute_materialized_backward=False).",
        "The last model is planned for the device that it runs on, op by op: `held` is what "
        "saved-tensor hooks see.",
        f"The lists name what one arm saves and pure half does not (and with a minus the reverse), "
        f"matched by size and dtype, and what O2 saves in FP32, down to {LISTED:.1%} of the total.",
    ]


def _table(name: str, found: dict[str, list[Saved]], held: dict[str, int] | None) -> Table:
    sums = {way: totals(saved) for way, saved in found.items()}
    unit, label = (1e9, "GB") if max(t["all"] for t in sums.values()) > 1e8 else (1e6, "MB")

    def row(way: str) -> tuple[str, ...]:
        total = sums[way]
        budget = way.partition(", budget")[1:] if ", budget" in way else ("", "")
        against = (base.name + "".join(budget) for base in (HALF, AUTOCAST))
        return (
            way,
            f"{total['all'] / unit:.3f}",
            f"{total['fp32'] / unit:.3f}",
            f"{total['fp32'] / total['all']:.1%}",
            f"{total['copies'] / unit:.3f}",
            *(f"{total['all'] / sums[base]['all']:.3f}x" for base in against),
            *([f"{held[way] / unit:.3f}"] if held else []),
        )

    columns = ["", f"saved, {label}", f"of it FP32, {label}", "share", f"copies of inputs, {label}",
               "over pure half", "over autocast"]  # fmt: skip
    return Table(name, (*columns, *(["held, " + label] if held else [])), [*map(row, sums)])


def _lists(name: str, found: dict[str, list[Saved]]) -> Iterator[Table]:
    columns = ("computed by", "tensors", "shape", "dtype", "MB")
    for way in (O1, O2, STEPPED, *WITH_HEAD):
        if way.name not in found:
            continue
        least = LISTED * totals(found[way.name])["all"]
        rows = [
            (group.op, f"{more:+d}", str(list(group.shape)), group.dtype, f"{bytes_ / 1e6:+.1f}")
            for group, more, bytes_ in excess(found[way.name], found[HALF.name])
            if abs(bytes_) >= least
        ]
        if rows:
            yield Table(f"{name}: {way.name} beyond pure half", columns, rows)
    full = [s for s in found[STEPPED.name] if s.dtype is torch.float32]
    rows = [
        (place(g), str(g.count), str(list(g.shape)), g.dtype,
         f"{g.bytes / 1e6:.1f}")
        for g in groups(full) if g.bytes >= LISTED * totals(found[STEPPED.name])["all"]
    ]  # fmt: skip
    if rows:
        yield Table(f"{name}: FP32 in {STEPPED.name}", columns, rows)


def _verdicts(work: Work, saved: dict[str, dict[str, list[Saved]]], held: dict[str, int]) -> Claims:
    for name, found in saved.items():
        ours, half = (totals(found[way.name]) for way in (STEPPED, HALF))
        over = ours["all"] / half["all"]
        yield f"{name}: O2 saves at most {OVER_HALF}x pure half: {over:.3f}x", over <= OVER_HALF
        share = ours["fp32"] / ours["all"]
        yield f"{name}: FP32 under {FULL_SHARE:.0%} of O2's bytes: {share:.1%}", share < FULL_SHARE
    for case in work.cases:
        for way in (w for w in WITH_HEAD if case.head):
            found = saved[case.name]
            ours, theirs = (totals(found[w.at(BUDGET).name]) for w in (way, AUTOCAST))
            over = ours["all"] / theirs["all"]
            claim = f"{case.name}: {way.name} at most {FUSED_OVER_AUTOCAST}x autocast, both at"
            yield f"{claim} budget {BUDGET:g}: {over:.3f}x", over <= FUSED_OVER_AUTOCAST
    small = saved[work.small.name]
    apart = max(abs(held[way] / totals(one)["all"] - 1) for way, one in small.items())
    yield f"counted and held bytes agree within 1%: {apart:.2%}", apart < 0.01


# -- sums ------------------------------------------------------------------------------------------
# Sums over what programs save, and what one saves beyond another.

SHOWN = 4
"""Of the groups of tensors in which two programs differ, so many are named."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Saved tensors that are alike."""

    count: int
    op: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    copied: bool


def groups(saved: Sequence[Saved]) -> list[Group]:
    """By operator, module, shape and dtype, the largest first."""
    found = [
        Group(number, one.op, one.module, one.shape, _short(one.dtype), number * one.bytes,
              one.copied)
        for one, number in collections.Counter(saved).items()
    ]  # fmt: skip
    return sorted(found, key=lambda group: -group.bytes)


def _short(dtype: torch.dtype) -> str:
    """As `bf16`, `f32`, `i64`."""
    name = str(dtype).removeprefix("torch.")
    return re.sub(r"^(bfloat|float|uint|int)", lambda m: m[0].replace("loat", ""), name)


def place(group: Group) -> str:
    """How many, by which operator, in which module."""
    return f"{group.count} {group.op}" + (f" in {group.module}" if group.module else "")


def totals(saved: Sequence[Saved]) -> dict[str, int]:
    """Bytes: all, those in FP32, those of copies of inputs."""
    return {
        "all": sum(s.bytes for s in saved),
        "fp32": sum(s.bytes for s in saved if s.dtype is torch.float32),
        "copies": sum(s.bytes for s in saved if s.copied),
    }


def excess(ours: Sequence[Saved], theirs: Sequence[Saved]) -> list[tuple[Group, int, int]]:
    """Where two programs differ, copies of inputs aside: one of the tensors (its `op` names
    several), and how many more of its size and dtype the first saves, in number and in bytes; the
    largest difference first.
    """

    def alike(one: Saved) -> tuple[int, torch.dtype]:
        return (one.bytes, one.dtype)

    mine, others = (
        collections.Counter(alike(one) for one in side if not one.copied) for side in (ours, theirs)
    )
    found = []
    for key in mine.keys() | others.keys():
        more = mine[key] - others[key]
        if more:
            side = ours if more > 0 else theirs
            example = groups([one for one in side if alike(one) == key and not one.copied])
            group = dataclasses.replace(example[0], op=", ".join(map(place, example[:SHOWN])))
            found.append((group, more, more * key[0]))
    return sorted(found, key=lambda entry: -abs(entry[2]))
