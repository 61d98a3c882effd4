"""O2's working copies: who owns them, and that a forward never reads a stale one.

A parameter that an `MPOptimizer` holds is an FP32 master weight; a model at O2 reads a copy of it
in the low dtype, which the optimizer's step writes. There is one copy for each parameter and dtype,
however many graphs read it.

    forward:  params, FP32  --ReadCopies-->  copies, low  -->  the compiled graph
    backward: p.grad, low   <--ReadCopies--  gradients, low (in FP16 times the loss scale)

Freshness. Before each forward every copy is compared with its master: same memory, same version
counter (torch bumps it at every write in place: load_state_dict, an initialiser, another optimizer,
an EMA that copies under no_grad). A write through `p.data` bumps nothing. So a master's class is
`MasterWeight`, an nn.Parameter that notes each time somebody takes its `.data`; its copy is then
cast anew before the next forward, changed or not.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

from .errors import MPCompileError
from .loss_scale import LossScale


class MasterWeight(nn.Parameter):
    """An nn.Parameter that knows when its memory was handed out by `.data`.

    An existing parameter becomes one by taking this class: it stays the same object, in the module
    and in the optimizer. A pickle or a deepcopy of it is a plain nn.Parameter again.
    """

    @property
    def data(self) -> torch.Tensor:
        self.mp_handed_out = True
        data: torch.Tensor = _DATA.__get__(self)
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.mp_handed_out = True
        _DATA.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            with torch.no_grad():
                memo[id(self)] = nn.Parameter(self.clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied


_DATA: Any = torch._C.TensorBase.data


class WorkingCopy:
    """The low-precision copy of one master weight.

    Attributes:
        tensor: the copy, of the master's shape and layout.
        scale: the loss scale its gradients are stored multiplied by, or None.
    """

    def __init__(self, master: torch.Tensor, dtype: torch.dtype) -> None:
        self.tensor = torch.empty_like(master, dtype=dtype, requires_grad=False)
        self.scale: LossScale | None = None
        self._seen: tuple[int, int] | None = None

    def fresh(self, master: torch.Tensor) -> torch.Tensor:
        """The copy, cast anew if the master may have changed since it was written."""
        if self._seen != _state(master) or getattr(master, "mp_handed_out", False):
            with torch.no_grad():
                self.tensor.copy_(master)
            self.written(master)
        return self.tensor

    def written(self, master: torch.Tensor) -> None:
        """Note that the copy holds what the master holds now."""
        if isinstance(master, MasterWeight):
            master.mp_handed_out = False
        self._seen = _state(master)


def _state(master: torch.Tensor) -> tuple[int, int]:
    return master.data_ptr(), master._version


_owners = WeakIdKeyDictionary()  # parameter -> weak reference to its optimizer
_copies = WeakIdKeyDictionary()  # parameter -> {dtype: WorkingCopy}
_generation = 0


def own(parameters: Iterable[torch.Tensor], owner: Any) -> None:
    """Make `owner` (an MPOptimizer) the one whose step writes the copies of these parameters."""
    global _generation
    _generation += 1
    for parameter in parameters:
        _owners[parameter] = weakref.ref(owner)


def owner_of(parameter: torch.Tensor) -> Any:
    """The living MPOptimizer that holds this parameter, or None."""
    reference = _owners.get(parameter)
    return reference() if reference is not None else None


def generation() -> int:
    """Grows whenever an optimizer takes ownership: what was compiled before may be outdated."""
    return _generation


def copies_of(parameter: torch.Tensor) -> dict[torch.dtype, WorkingCopy]:
    """All copies of a parameter, by dtype."""
    found: dict[torch.dtype, WorkingCopy] = _copies.get(parameter, {})
    return found


def copy_of(parameter: torch.Tensor, dtype: torch.dtype) -> WorkingCopy:
    """The copy of a parameter in `dtype`; made, and its class changed, at the first call."""
    known = _copies.setdefault(parameter, {})
    if dtype not in known:
        if type(parameter) is nn.Parameter:
            parameter.__class__ = MasterWeight
        known[dtype] = WorkingCopy(parameter, dtype)
    copy: WorkingCopy = known[dtype]
    return copy


class Reader:
    """Hands the copies of some parameters to a compiled graph, and takes their gradients back.

    Args:
        dtype: of the copies.
        scale: the loss scale inside the graph, or None.
        low_gradients: store gradients in the low dtype (in FP16 times the scale) for the one
            optimizer that owns the parameters; otherwise in FP32 and true to size.
    """

    def __init__(self, dtype: torch.dtype, scale: LossScale | None, *, low_gradients: bool) -> None:
        self.dtype, self.scale, self.low_gradients = dtype, scale, low_gradients

    def read(self, masters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The copies, fresh; tracked by autograd where it is on."""
        copies = [copy_of(p, self.dtype) for p in masters]
        tensors = [c.fresh(p) for c, p in zip(copies, masters, strict=True)]
        if not torch.is_grad_enabled():
            return tensors
        if self.low_gradients:
            for copy, master in zip(copies, masters, strict=True):
                copy.scale = self.scale
                _store_low(master, self.dtype)
        return _ReadCopies.apply(self, tensors, *masters)  # type: ignore[no-any-return, no-untyped-call]


def _store_low(master: torch.Tensor, dtype: torch.dtype) -> None:
    if master.requires_grad and master.grad is None and master.grad_dtype is not dtype:
        master.grad_dtype = dtype


class _ReadCopies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, reader: Reader, tensors: Sequence[torch.Tensor], *masters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.reader, ctx.masters = reader, masters
        ctx.used = reader.scale.used if reader.scale is not None else None
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        results: list[torch.Tensor | None] = []
        for grad, master in zip(grads, ctx.masters, strict=True):
            if grad is not None and master.grad_dtype is not grad.dtype:
                grad = grad.float()
                if ctx.used is not None:
                    grad = grad * ctx.used.reciprocal()
            results.append(grad)
        return (None, None, *results)


def check_one_scale(parameter: torch.Tensor, scale: LossScale | None, name: str) -> None:
    """Refuse two loss scales for gradients that are stored scaled.

    Raises:
        MPCompileError: another model reads this parameter under another scale.
    """
    for copy in copies_of(parameter).values():
        if copy.scale is not None and copy.scale is not scale:
            raise MPCompileError(
                f"{name} is shared by two O2 models with loss scales of their own, and its "
                "gradient can be stored under one only: hand both models the same "
                "LossScale, mpcompile(..., loss_scale=scale)"
            )
