"""FP32 master weights of parameters that are themselves stored in a low dtype.

It is the mirror of the working copies (`scaling/copies.py`). There the model's parameter is the
master; here it is the copy, and its master is in the optimizer's state, beside FP32 moments:

    p: bf16, the model's   <--   state[p]["master"]: f32   <--   the traced step

What others write to the parameter stays: `load_state_dict`, an initialiser, a write through
`p.data`. The step compares each element with the master. Where the master, rounded, is another
number, someone has written the parameter, and the master takes its value. So nobody has to notice
when it happens; and whoever puts back what the step had written (weights that were swapped for an
evaluation) loses nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..ir.dtypes import HALF
from ..ranks.shards import is_sharded

MASTER = "master"


def is_low(param: torch.Tensor) -> bool:
    """Whether a parameter has a master elsewhere: it is stored in FP16 or BF16."""
    return param.dtype in HALF


def updated_by(optimizer: Optimizer, param: torch.Tensor) -> torch.Tensor:
    """The FP32 tensor that a step updates: the parameter, or its master."""
    master: torch.Tensor = optimizer.state[param][MASTER] if is_low(param) else param
    return master


def entries_of(optimizer: Optimizer, param: torch.Tensor) -> Mapping[str, Any]:
    """The state of a parameter that the optimizer's own step knows: all but the master."""
    entries: Mapping[str, Any] = optimizer.state.get(param, {})
    return {k: v for k, v in entries.items() if k != MASTER} if MASTER in entries else entries


def make_masters(optimizer: Optimizer, params: Iterable[torch.Tensor]) -> None:
    """Make the masters that don't exist yet, and widen state from steps without them."""
    for param in params:
        if not is_low(param):
            optimizer.state.get(param, {}).pop(MASTER, None)  # it was low before
            continue
        entries = optimizer.state[param]
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and value.dtype in HALF:
                entries[key] = value.float()
        if MASTER not in entries:
            entries[MASTER] = param.detach().float()


def followed(param: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """A master with the values that someone else than a step has written to its parameter."""
    return torch.where(master.to(param.dtype) == param, master, param.to(master.dtype))


@contextlib.contextmanager
def in_fp32(optimizer: Optimizer) -> Iterator[dict[torch.Tensor, torch.Tensor]]:
    """In this context, the optimizer holds FP32 tensors in place of its low parameters: the
    masters, or where there is none, zeros that take no memory.

    So torch's own code makes and loads state in FP32, and a step is done as that of FP32 weights.

    Yields:
        low parameter -> the tensor in its place.
    """
    low = [p for group in optimizer.param_groups for p in group["params"] if is_low(p)]
    before = {p: optimizer.state.pop(p) for p in low if p in optimizer.state}
    masters = {p: entries.pop(MASTER) for p, entries in before.items() if MASTER in entries}
    wide = {p: masters[p] if p in masters else zeros_like(p, torch.float32) for p in low}
    optimizer.state.update({wide[p]: entries for p, entries in before.items()})
    _replace(optimizer, wide)
    try:
        yield wide
    finally:
        _replace(optimizer, {w: p for p, w in wide.items()})
        for p, w in wide.items():
            w.grad = None
            if w in optimizer.state:
                entries = optimizer.state[p] = optimizer.state.pop(w)
                if p in masters and entries is before[p]:  # else a state was loaded meanwhile
                    entries[MASTER] = masters[p]


def _replace(optimizer: Optimizer, by: Mapping[torch.Tensor, torch.Tensor]) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [by.get(p, p) for p in group["params"]]


def zeros_like(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in the shape of a parameter; where that is whole, they take no memory."""
    if is_sharded(param):
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    return param.new_zeros((), dtype=dtype, requires_grad=False).expand(param.shape)
