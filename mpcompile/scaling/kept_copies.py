"""Evaluations read weights that are cast once: which parameters have such copies, and how long.

A graph without grad mode reads copies of FP32 weights in the low dtype, as a training's may
(`copies.py`, where is told how a change of a weight is noticed). Nobody but such graphs reads them.

    evaluating: weight --cast once--> kept copy --> graph       until the weight changes
    training:   weight --cast in the graph-->                   no copy exists

While a module evaluates, its parameters have the class `KeptWeight`, which notes accesses by
`.data` and `detach()`. The first call in grad mode gives them back their class and frees the
copies, so that a training has neither, and the code that was compiled for it stays valid.

A weight is cast in each call, as in a training, where a write to it might go unnoticed: other
processes or other tensors share its memory.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..devices.registry import capabilities, is_supported
from ..ranks.shards import is_distributed
from ..torch_inside.private_names import Part, why_off
from ..torch_inside.tensors import MARK, holders, storage_of
from . import copies
from .copies import MasterWeight, WorkingCopy


class KeptWeight(MasterWeight):
    """A parameter of a module that evaluates. It has its copies, by dtype and shape: what they are
    is of no concern to a training, so `parameters.py` doesn't count it as a change.
    """

    _mp_kept: Mapping[tuple[torch.dtype, tuple[int, ...]], WorkingCopy] = MappingProxyType({})


_keeping: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the modules that evaluate


def follow_grad_mode(module: nn.Module) -> None:
    """Keep copies of the module's weights while it is called without grad mode; free them in the
    first call that trains. Asked in each call.
    """
    # Other processes may send weights: what a collective writes isn't counted as a change of them.
    evaluates = not (torch.is_grad_enabled() or is_distributed())
    if evaluates is (module in _keeping):
        return
    if evaluates:
        _keeping.add(module)
        for parameter in _not_shared(module):
            parameter.__class__ = KeptWeight
    else:
        _keeping.discard(module)
        for parameter in module.parameters():
            if type(parameter) is KeptWeight:
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]
                for name in [n for n in vars(parameter) if n.startswith("_mp_") and n != MARK]:
                    delattr(parameter, name)


def _not_shared(module: nn.Module) -> Iterator[nn.Parameter]:
    """The FP32 parameters whose memory nobody can write to without their noticing it."""
    if why_off(Part.OPTIMIZER) is not None:  # with it goes `holders`, which tells
        return
    plain = [
        p
        for p in module.parameters()
        if type(p) is nn.Parameter
        and p.dtype is torch.float32
        and is_supported(p.device)
        and not p.is_inference()  # its writes aren't counted
    ]
    own = Counter(map(storage_of, plain))
    for parameter in plain:
        memory = parameter.untyped_storage()
        others = holders(memory) - 1 - own[storage_of(parameter)]
        if not others and not capabilities(parameter.device).is_shared(memory):
            yield parameter


def is_kept(value: Any) -> bool:
    """Whether an input of a graph that is compiled now is a weight of which a copy may be kept."""
    return isinstance(value, KeptWeight) and not torch.is_grad_enabled()


def copies_of(weight: torch.Tensor) -> Mapping[tuple[torch.dtype, tuple[int, ...]], WorkingCopy]:
    """All kept copies of a weight, by dtype and the shape that they are stored in."""
    return getattr(weight, "_mp_kept", {})


def stored_shape(weight: torch.Tensor, dtype: torch.dtype) -> tuple[int, ...] | None:
    """A shape in which a kept copy of a weight is stored, or None: there is no copy."""
    return next((shape for known, shape in copies_of(weight) if known is dtype), None)


def copy_of(weight: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> WorkingCopy:
    """The copy of a weight that is stored in this shape. The first call makes it, without values.

    A graph that is compiled while there is none may want another shape than an earlier graph.
    """
    key, known = (dtype, tuple(shape)), copies_of(weight)
    copy = known.get(key)
    if copy is None or copy.stored.device != weight.device:
        with torch.inference_mode(False):  # what is made in that mode can't be written to later
            copy = WorkingCopy(weight, dtype, shape)
        if isinstance(weight, KeptWeight):  # else another thread has begun to train it
            weight._mp_kept = {**known, key: copy}
    return copy


class KeptCopies:
    """Gives a graph without grad mode its copies of weights.

    Args:
        dtype: of the copies.
        device: where they are.
        shapes: the shape that each is stored in.
        kept: for each, whether it is a kept one; else an `MPOptimizer` writes it.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        shapes: Sequence[Sequence[int]],
        kept: Sequence[bool],
    ) -> None:
        self._dtype, self._device = dtype, capabilities(device)
        self._read = [
            (copy_of if own else copies.copy_of, shape)
            for own, shape in zip(kept, shapes, strict=True)
        ]

    def read(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The copies, brought up to date."""
        found = [
            of(weight, self._dtype, shape)
            for weight, (of, shape) in zip(weights, self._read, strict=True)
        ]
        records = self._device.is_recording()  # then the graph is to cast them, at each replay
        stale = [
            (copy, weight)
            for copy, weight in zip(found, weights, strict=True)
            if records or copy.is_stale(weight)
        ]
        with torch.inference_mode(False), torch.no_grad():
            for copy, weight in stale:
                copy.tensor.copy_(weight)
        if stale and not records:
            # Another thread may read them next, in a stream of its own.
            self._device.synchronize()
            for copy, weight in stale:
                copy.written(weight)
        return [copy.stored for copy in found]
