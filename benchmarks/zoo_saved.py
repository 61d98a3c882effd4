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

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import saved_bytes
from benchmarks.harness.report import Claims, Report, Settings, Table, paragraphs
from benchmarks.harness.ways import AUTOCAST
from benchmarks.zoo import LEAST
from benchmarks.zoo.catalogue import LIBRARIES, rows_of
from benchmarks.zoo.making import Entry, Inputs
from benchmarks.zoo.measure import LEVELS
from mpcompile.plans.partitioned import Saved

DEVICES = ("cpu",)
SAVED = "benchmarks.zoo_saved:saved"
QUICK = ("transformers/gpt2", "timm/vit_tiny")
O2_MEDIAN = 0.85
_SAME = 1.005
"""Up to here a level keeps as much as the peer: they differ in statistics of single norms."""


def run(settings: Settings) -> Report:
    """Count every model; under `settings.quick` two. Rows are kept as those of `zoo` are."""
    return make_report(rows_of("zoo_saved", 1, QUICK, quick=settings.quick, function=SAVED))


def make_report(rows: Sequence[Mapping[str, Any]]) -> Report:
    """The whole report."""
    return Report(
        title="A zoo of architectures: bytes kept for the backward",
        notes=paragraphs(__doc__),
        tables=[*(_table(library, rows) for library in LEAST), *_beyond(rows)],
        verdicts=dict(_verdicts(rows)),
        data={"rows": list(rows)},
    )


def _table(library: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("model", "kind", f"{AUTOCAST}, KB", "of it casts", *LEVELS,
               *(f"{level}, without casts" for level in LEVELS))  # fmt: skip

    def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
        peer = row.get("saved", {}).get(AUTOCAST, {})
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


def _verdicts(rows: Sequence[Mapping[str, Any]]) -> Claims:
    for casts in (True, False):
        what = "" if casts else ", without casts"
        for level in LEVELS:
            known = [ratio for row in rows
                     if (ratio := share(row, level, casts=casts)) is not None]  # fmt: skip
            fine = sum(ratio <= _SAME for ratio in known)
            claim = f"{level} keeps no more than {AUTOCAST}{what}: {fine} of {len(known)}"
            yield claim, fine == len(known)
        if known:
            middle = median(known)
            claim = f"O2 keeps at most {O2_MEDIAN:.2f}x in the median{what}: {middle:.2f}x"
            yield claim, middle <= O2_MEDIAN


# -- saved -----------------------------------------------------------------------------------------
# Bytes that autograd holds between forward and backward, by compile + autocast and by mpcompile.

_LISTED = _SHOWN = 4
"""Differences of two programs that are kept, and tensors that are named for each."""
WAYS = {AUTOCAST: saved_bytes.AUTOCAST, "O1": saved_bytes.O1, "O2": saved_bytes.O2}


def saved(name: str, draws: int = 1) -> dict[str, Any]:
    """Of each way: `held`, bytes that autograd holds behind the model's own loss; `casts`, those
    among them of copies of weights and of the batch; and, of ours, `more`: what it keeps beyond the
    peer. Or `failed`, why it didn't run.
    """
    library, _, model_name = name.partition("/")
    entry = LIBRARIES[library][model_name]
    inputs = entry.draw(torch.Generator().manual_seed(0))
    found: dict[str, Any] = {}
    theirs: list[Saved] = []
    for way, meant in WAYS.items():
        torch.manual_seed(0)
        try:
            listed, held, casts = _held(entry, entry.build(), meant, inputs)
        except Exception as error:
            found[way] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
            continue
        theirs = listed if way == AUTOCAST else theirs
        more = excess(listed, theirs)[:_LISTED]
        found[way] = {"held": held, "casts": casts, "more": more}
    return {"name": name, "kind": entry.kind, "saved": found}


def _held(
    entry: Entry, model: nn.Module, way: saved_bytes.Way, inputs: Inputs
) -> tuple[list[Saved], int, int]:
    """What partitioned forwards save, and the bytes that autograd holds: all, and of casts."""
    listed: list[Saved] = []
    tensors: dict[int, Tensor] = {}  # by the address of their memory

    def pack(tensor: Tensor) -> Tensor:
        tensors.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    batch = [value for value in inputs.values() if isinstance(value, Tensor)]
    there = [*model.parameters(), *model.buffers(), *batch]
    with saved_bytes.planned_for_gpu(), saved_bytes.prepared(model, way, listed, runs=True):
        with saved_bytes.autocast(way, torch.device("cpu")):
            entry.loss(model, inputs)  # compiles
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                entry.loss(model, inputs)
        for tensor in there:
            tensors.pop(tensor.untyped_storage().data_ptr(), None)
    casts = {
        _contents(tensor.to(saved_bytes.LOW)) for tensor in there if tensor.dtype == torch.float32
    }
    size_of = {at: tensor.untyped_storage().nbytes() for at, tensor in tensors.items()}
    low = [at for at, tensor in tensors.items() if _contents(tensor) in casts]
    return listed, sum(size_of.values()), sum(size_of[at] for at in low)


def excess(ours: Sequence[Saved], theirs: Sequence[Saved]) -> list[tuple[int, str, str]]:
    """Where two programs differ, copies of inputs aside: how many bytes more the first one saves of
    tensors of one size and dtype, the dtype, and some of the tensors; the largest difference first.
    """

    def alike(one: Saved) -> tuple[int, torch.dtype]:
        return (one.bytes, one.dtype)

    mine, others = (
        Counter(alike(one) for one in side if not one.copied) for side in (ours, theirs)
    )
    found = []
    for key in mine.keys() | others.keys():
        more = mine[key] - others[key]
        if more:
            side = ours if more > 0 else theirs
            which = Counter(one for one in side if alike(one) == key and not one.copied)
            named = ", ".join(_named(*one) for one in which.most_common(_SHOWN))
            found.append((more * key[0], _short(key[1]), named))
    return sorted(found, key=lambda entry: -abs(entry[0]))


def _named(one: Saved, number: int) -> str:
    """How many, by which operator, in which module."""
    return f"{number} {one.op}" + (f" in {one.module}" if one.module else "")


def _short(dtype: torch.dtype) -> str:
    """As `bf16`, `f32`, `int64`."""
    return str(dtype).removeprefix("torch.").replace("loat", "")


def _contents(tensor: Tensor) -> tuple[int, torch.dtype, float]:
    """Equal for the same numbers in any layout; never for others, but by chance."""
    return tensor.numel(), tensor.dtype, float(tensor.detach().double().sum())


def share(row: Mapping[str, Any], level: str, *, casts: bool) -> float | None:
    """Of what the peer holds, copies of weights among it or not; None if one didn't run."""
    sides = [row.get("saved", {}).get(way, {}) for way in (level, AUTOCAST)]
    if not all("held" in side for side in sides):
        return None
    ours, theirs = (side["held"] - (0 if casts else side["casts"]) for side in sides)
    return float(ours / theirs)
