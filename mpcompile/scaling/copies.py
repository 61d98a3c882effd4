"""Working copies: which parameters have one, and that a forward never reads a stale one.

A parameter that an `MPOptimizer` holds is an FP32 master weight; a model at O2, or on a CPU at O1,
reads a copy of it in the low dtype, which the optimizer's step writes. There is one for each
parameter and dtype, however many graphs read it.

    forward:  params, FP32  --ReadCopies-->  copies, low  -->  the compiled graph
    backward: p.grad, low   <--ReadCopies--  gradients, low (in FP16 times the loss scale)

Freshness. Before each forward every copy is compared with its master: same memory, same version
counter. Torch increments the counter at every write in place: load_state_dict, an initialiser,
another optimizer, an EMA that copies under no_grad. A write through `p.data` doesn't increment it,
nor does one through the `.data` of what `state_dict()` gives, by another tensor over the same
memory (parameters that are parts of one flat buffer), or by another process. So a master's class is
`MasterWeight`, an nn.Parameter that notes each access to its `.data` and each `detach()`. Its copy
is then cast again before the next forward, and before each one while the tensor from there exists,
and before the first after that. So is the copy of a parameter that doesn't hold its memory alone,
and of one that has a class of someone's own, which it keeps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..devices.registry import capabilities
from ..ir.fakes import memory_for
from ..ir.step_config import CopyLayout
from ..operators.library import differentiable_once
from ..torch_inside.names import keeps_graph, suggest_memory_format
from ..torch_inside.tensors import holders, hooks_on, version
from . import parameters
from .loss_scale import LossScale
from .low_gradients import expect, hide_low_gradients, stores, unscaled


class MasterWeight(nn.Parameter):
    """An nn.Parameter that counts how often `.data` or `detach()` gave access to its memory.

    An existing parameter becomes one by taking this class: it stays the same object, in the module
    and in the optimizer. A pickle or a deepcopy of it is a plain nn.Parameter again.
    """

    @property
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # Dynamo would not find its way out
    def data(self) -> torch.Tensor:
        self._mp_accesses = _accesses(self) + 1
        data: torch.Tensor = _DATA.__get__(self)
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self._mp_accesses = _accesses(self) + 1
        _DATA.__set__(self, value)

    def detach(self) -> torch.Tensor:
        """As `state_dict()` does: the `.data` of what it gives counts its writes by itself."""
        if not torch.compiler.is_dynamo_compiling():
            self._mp_accesses = _accesses(self) + 1
        return super().detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(_DATA.__get__(self), self.requires_grad)
        of_users = {k: v for k, v in self.__dict__.items() if not k.startswith("_mp_")}
        plain.__dict__.update(of_users)
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            with torch.no_grad():
                memo[id(self)] = nn.Parameter(self.clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied


_DATA: Any = torch.Tensor.data


class WorkingCopy:
    """The low-precision copy of one master weight.

    Attributes:
        stored: the tensor that graphs read: the copy, followed by zeros if it is stored padded.
        tensor: the copy: all of `stored`, or the part of it that has the master's shape.
        is_padded: whether it is only a part.
        awaited: how many forwards have read it whose backward is still to come, as far as known.
    """

    def __init__(
        self, master: torch.Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None
    ) -> None:
        self.stored = memory_for(master, dtype, shape)
        self.tensor = self.real_part(self.stored, master)
        self.is_padded = self.stored.shape != self.tensor.shape
        self.awaited = 0
        self._shared = False  # whether another process may write to the master
        self._was_open = False  # whether something could when the copy was written
        self._seen: tuple[int, int, int] | None = None

    def is_stale(self, master: torch.Tensor) -> bool:
        """Whether the master may have changed since the copy was written."""
        return self._seen != _state(master) or self._is_exposed(master)

    def refresh(self, master: torch.Tensor) -> None:
        """Cast the copy again if the master may have changed since it was written."""
        if not self.is_stale(master):
            return  # as mostly: each forward asks this of each parameter
        # If `.data` was only read: autograd saved the copy in a forward whose backward is to come,
        # and would take rewriting the same numbers for a change.
        if not (self.awaited and self._is_exposed(master) and self._holds(master)):
            with torch.no_grad():
                self.tensor.copy_(master)
        self.written(master)

    def _is_exposed(self, master: torch.Tensor) -> bool:
        """Whether something may have written to the master without its version's saying so."""
        accessed = self._seen is not None and self._seen[2] != _accesses(master)
        # Who could write then may have done so since, and be gone.
        return self._was_open or accessed or self._is_open(master)

    def _is_open(self, master: torch.Tensor) -> bool:
        """Whether something that exists now may write to the master like that."""
        notes = isinstance(master, MasterWeight)
        # What `.data` or `detach()` gave, and what was made of it, holds the memory, too. `master`
        # does, and the memory that is asked.
        return not notes or self._shared or holders(master.untyped_storage()) > 2

    def _holds(self, master: torch.Tensor) -> bool:
        """Whether the copy holds the master's current values; waits for the device."""
        with torch.no_grad():
            return torch.equal(self.tensor, master.to(self.tensor.dtype))

    @property
    def layout(self) -> CopyLayout:
        return CopyLayout(self.tensor.dtype, self.tensor.stride())

    @staticmethod
    def real_part(padded: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
        """The part of a padded copy, or of its gradient, that is not padding: a view."""
        for dim, size in enumerate(master.shape):
            if padded.shape[dim] != size:
                padded = padded.narrow(dim, 0, size)
        return padded

    def written(self, master: torch.Tensor) -> None:
        """Note that the copy holds the master's current values."""
        seen = _state(master)
        if self._seen is None or self._seen[0] != seen[0]:
            memory = master.untyped_storage()
            self._shared = capabilities(master.device).is_shared(memory)
        self._seen, self._was_open = seen, self._is_open(master)


def _accesses(master: torch.Tensor) -> int:
    """How often `.data` of a master weight was replaced, or it or `detach()` was taken."""
    count: int = master.__dict__.get("_mp_accesses", 0)
    return count


def _state(master: torch.Tensor) -> tuple[int, int, int]:
    return master.data_ptr(), version(master), _accesses(master)


def copies_of(parameter: torch.Tensor) -> Mapping[torch.dtype, WorkingCopy]:
    """All copies of a parameter, by dtype."""
    return parameters.state_of(parameter).copies


def stored_shape(parameter: torch.Tensor, dtype: torch.dtype) -> tuple[int, ...] | None:
    """The shape in which the copy of a parameter is stored, or None: there is no copy yet."""
    copy = copies_of(parameter).get(dtype)
    return None if copy is None else tuple(copy.stored.shape)


def copy_of(
    parameter: torch.Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None
) -> WorkingCopy:
    """The copy of a parameter in `dtype`. The first call makes it, and changes the parameter's
    class. It is stored in `shape` (default: the parameter's own), which later calls don't change.
    """
    known = copies_of(parameter)
    if dtype in known:
        return known[dtype]
    if type(parameter) is nn.Parameter:
        hide_low_gradients(of=MasterWeight)
        parameter.__class__ = MasterWeight
    copy = WorkingCopy(parameter, dtype, shape)
    parameters.note(parameter, copies={**known, dtype: copy})
    return copy


def read_in_full(masters: Iterable[torch.Tensor]) -> None:
    """Note that the gradients of these must be FP32 from now on: a graph reads the parameters in
    FP32, too, or their gradients are averaged over processes.
    """
    for master in masters:
        if parameters.state_of(master).in_full:
            continue
        parameters.note(master, in_full=True)
        if copies_of(master):
            expect(master, low=False)


class Reader:
    """Gives the copies of some parameters to a compiled graph, and takes their gradients back.

    Args:
        dtype: of the copies.
        scale: the loss scale inside the graph, or None.
        shapes: in which the graph takes each copy: the parameter's, or a padded one.
    """

    def __init__(
        self, dtype: torch.dtype, scale: LossScale | None, shapes: Sequence[tuple[int, ...]]
    ) -> None:
        self.dtype, self.scale, self._shapes = dtype, scale, shapes
        self._all = parameters.Derived()

    def read(self, masters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The copies, brought up to date; tracked by autograd where grad mode is on."""
        known = self._known(masters)
        copies = [copy for ref in known.copies if (copy := ref()) is not None]
        for copy, master in zip(copies, masters, strict=True):
            copy.refresh(master)
        if not torch.is_grad_enabled():
            return self._in_shape([copy.stored for copy in copies])
        lows = self.stored_low(masters, known)
        for copy, master, low in zip(copies, masters, lows, strict=True):
            copy.awaited += 1
            if master.requires_grad:
                expect(master, low=low)
        return self._in_shape(_ReadCopies.apply(self, copies, *masters))  # type: ignore[no-untyped-call]

    def stored_low(
        self, masters: Sequence[torch.Tensor], known: _OfMasters | None = None
    ) -> list[bool]:
        """Whether the gradient of each may have the low dtype: that is BF16, it has no loss scale,
        and only its optimizer reads it, and no hook. (DDP, in C++, reads it, too: `agreement.py`.)
        """
        known = known or self._known(masters)
        wide = self.dtype is not torch.bfloat16 or self.scale is not None
        return [
            not wide and own and not any(hooks_on(master))
            for master, own in zip(masters, known.read_by_optimizer, strict=True)
        ]

    def _in_shape(self, stored: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Copies as the graph takes them: another graph may have had one stored otherwise."""
        pairs = zip(stored, self._shapes, strict=True)
        return [x if x.shape == shape else _padded(x, shape) for x, shape in pairs]

    def _known(self, masters: Sequence[torch.Tensor]) -> _OfMasters:
        known: _OfMasters | None = self._all.of(masters)
        if known is None or known.changes != parameters.changes():
            parameters.own_again(masters)
            pairs = zip(masters, self._shapes, strict=True)
            copies = [weakref.ref(copy_of(p, self.dtype, shape)) for p, shape in pairs]
            states = map(parameters.state_of, masters)
            own = [not s.in_full and s.optimizer is not None and len(s.copies) == 1 for s in states]
            known = _OfMasters(parameters.changes(), copies, own)
            self._all.note(masters, known)
        return known


def _padded(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor in this shape: zeros after it, or without its last elements."""
    by = [size - has for size, has in zip(shape, x.shape, strict=True)]
    return F.pad(x, [n for change in reversed(by) for n in (0, change)])


class _OfMasters(NamedTuple):
    """What `parameters` knows of some masters, as long as nothing changes there: each forward and
    each backward asks of all of them.

    Attributes:
        changes: the count of changes up to then.
        copies: theirs. While nothing changes, the masters keep them alive.
        read_by_optimizer: for each, whether its MPOptimizer alone reads the gradients of its copy,
            apart from hooks.
    """

    changes: int
    copies: Sequence[weakref.ref[WorkingCopy]]
    read_by_optimizer: Sequence[bool]


class _ReadCopies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, reader: Reader, copies: Sequence[WorkingCopy], *masters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.reader, ctx.copies, ctx.masters = reader, copies, masters
        ctx.scale = None if reader.scale is None else reader.scale.used
        ctx.set_materialize_grads(False)
        return tuple(copy.stored.detach() for copy in copies)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        results: dict[int, torch.Tensor] = {}
        wide: dict[int, torch.Tensor] = {}  # those that leave in FP32, as they came
        nodes = [node for node, _ in ctx.next_functions]  # one for each input
        lows = ctx.reader.stored_low(ctx.masters)
        for i, (grad, copy, master) in enumerate(zip(grads, ctx.copies, ctx.masters, strict=True)):
            copy.awaited = max(0, copy.awaited - 1)
            if grad is None or nodes[i] is None:
                continue
            if copy.is_padded:
                # In the parameter's layout: autograd then stores this gradient without a copy.
                format_ = suggest_memory_format(master)
                grad = copy.real_part(grad, master).contiguous(memory_format=format_)
            low = lows[i] and stores(nodes[i])
            if low and master.grad is not None:  # sums over backwards are FP32
                low, master.grad = False, master.grad.float()
            (results if low else wide)[i] = grad
        true = unscaled(list(wide.values()), ctx.scale)
        results.update(zip(wide, true, strict=True))
        if ctx.scale is not None and true:
            ctx.reader.scale.overflows.saw(true)
        if not keeps_graph():
            ctx.scale = None  # as autograd frees what is saved, even if someone keeps a loss
        return (None, None, *map(results.get, range(len(grads))))
