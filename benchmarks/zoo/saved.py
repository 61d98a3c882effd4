"""Bytes that autograd holds between forward and backward, by compile + autocast and by mpcompile.

`python -m benchmarks.zoo.saved 1 transformers/gpt2` counts them for each model that it names, and
prints a line of JSON for each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.saved_bytes.cases import AUTOCAST, O1, O2, Way
from benchmarks.saved_bytes.count import LOW, autocast, planned_for_gpu, prepared
from benchmarks.saved_bytes.sums import excess
from mpcompile.plans.partitioned import Saved

from .arms import BOTH
from .catalogue import LIBRARIES
from .making import Entry, Inputs

__all__ = ["saved", "share"]

_LISTED = 4
WAYS = {BOTH: AUTOCAST, "O1": O1, "O2": O2}


def saved(name: str) -> dict[str, Any]:
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
        theirs = listed if way == BOTH else theirs
        more = [(size, group.dtype, group.op) for group, _, size in excess(listed, theirs)]
        found[way] = {"held": held, "casts": casts, "more": more[:_LISTED]}
    return {"name": name, "kind": entry.kind, "saved": found}


def _held(entry: Entry, model: nn.Module, way: Way, inputs: Inputs) -> tuple[list[Saved], int, int]:
    """What partitioned forwards save, and the bytes that autograd holds: all, and of casts."""
    listed: list[Saved] = []
    tensors: dict[int, Tensor] = {}  # by the address of their memory

    def pack(tensor: Tensor) -> Tensor:
        tensors.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    batch = [value for value in inputs.values() if isinstance(value, Tensor)]
    there = [*model.parameters(), *model.buffers(), *batch]
    with planned_for_gpu(), prepared(model, way, listed, runs=True):
        with autocast(way, torch.device("cpu")):
            entry.loss(model, inputs)  # compiles
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                entry.loss(model, inputs)
        for tensor in there:
            tensors.pop(tensor.untyped_storage().data_ptr(), None)
    casts = {_contents(tensor.to(LOW)) for tensor in there if tensor.dtype == torch.float32}
    size_of = {at: tensor.untyped_storage().nbytes() for at, tensor in tensors.items()}
    low = [at for at, tensor in tensors.items() if _contents(tensor) in casts]
    return listed, sum(size_of.values()), sum(size_of[at] for at in low)


def _contents(tensor: Tensor) -> tuple[int, torch.dtype, float]:
    """Equal for the same numbers in any layout; never for others, but by chance."""
    return tensor.numel(), tensor.dtype, float(tensor.detach().double().sum())


def share(row: Mapping[str, Any], level: str, *, casts: bool) -> float | None:
    """Of what the peer holds, copies of weights among it or not; None if one didn't run."""
    sides = [row.get("saved", {}).get(way, {}) for way in (level, BOTH)]
    if not all("held" in side for side in sides):
        return None
    ours, theirs = (side["held"] - (0 if casts else side["casts"]) for side in sides)
    return float(ours / theirs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for wanted in sys.argv[2:]:
        print(json.dumps(saved(wanted)), flush=True)
