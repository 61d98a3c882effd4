"""How the gradient of a parameter that has a working copy is stored.

In the low dtype, as long as the parameter's MPOptimizer alone reads it; in FP16 multiplied by the
loss scale. Autograd adds up whatever reaches a parameter, and a scaled gradient must not be
added to a true one. So it doesn't go through autograd: it is put aside, and a zero that takes no
memory goes in its place.

    a graph's backward: puts its scaled gradient aside  --zero-->  AccumulateGrad of the parameter

A hook sees what arrived just before that node stores it. If it is that zero, all of the gradient
came out of our graphs, and what was put aside is stored, scaled. Otherwise a part of it came from
elsewhere (a penalty on the weights, a part of the model that runs uncompiled): then all of it is
stored in FP32 and true to size, and so is what was stored before. `p.grad.dtype` tells which of the
two was done.

A scaled gradient is stored with what it was multiplied by. Where the loss scale has moved since
(another optimizer of the same scale stepped in between), it is brought to the other scale.

Torch internals used here were read in torch 2.13 and exist in 2.11.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ..devices.registry import capabilities
from ..errors import MPCompileError
from . import optimizers, parameters
from .loss_scale import LossScale


@dataclass(frozen=True)
class Multiplied:
    """What a gradient is multiplied by.

    Attributes:
        by: 0-d, on the device.
        moves: two of the same loss scale with equal `moves` are the same number.
    """

    by: torch.Tensor
    moves: int

    @classmethod
    def now(cls, scale: LossScale | None) -> Multiplied | None:
        """What the forward that runs now multiplies by."""
        if scale is None or scale.used is None:
            return None
        return cls(scale.used, scale.live.moves)

    def true(self, grad: torch.Tensor) -> torch.Tensor:
        return grad.float() * self.by.reciprocal()

    def bring(self, grad: torch.Tensor, other: Multiplied) -> torch.Tensor:
        """A gradient multiplied by `other`, multiplied by this instead."""
        return grad if other.moves == self.moves else grad * (self.by / other.by)

    @classmethod
    def least(cls, found: Sequence[Multiplied]) -> Multiplied:
        """The smallest of some: at it, what fits at each of them fits. Not read by the host."""
        distinct = list({m.moves: m for m in found}.values())
        if len(distinct) == 1:
            return distinct[0]
        return cls(torch.stack([m.by for m in distinct]).amin(), next(_unequal))


# No number of moves: what is made here is equal to nothing that was known before.
_unequal = itertools.count(-1, -1)


class LowGradient:
    """The gradient of one parameter, made by graphs that read its copy in `dtype`.

    Attributes:
        scale: the loss scale of these graphs, while gradients are stored scaled, or None.
        stored: what `p.grad` is multiplied by while it is stored in the low dtype and scaled.
    """

    def __init__(self, master: torch.Tensor, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.scale: LossScale | None = None
        self.stored: Multiplied | None = None
        self._master = weakref.ref(master)
        self._shape = tuple(master.shape)
        self._zero = torch.zeros((), dtype=dtype, device=master.device).expand(self._shape)
        self._aside: dict[int, tuple[torch.Tensor, Multiplied]] = {}  # by backward
        self._arrived: tuple[weakref.ref[torch.Tensor], int] | None = None

    # -- in a forward ---------------------------------------------------------------------------

    def expect(self, master: torch.Tensor, scale: LossScale | None, *, low: bool) -> None:
        """A forward is about to read the copy; its gradient is to be stored low, or true in FP32.

        Args:
            scale: the loss scale inside the graph, or None.
        """
        if self._aside and torch._C._current_graph_task_id() == -1:
            self._aside.clear()  # of a backward that failed: none is running
        self._set_scale(scale if low else None)
        if not low:
            self.widen(master)
        else:
            # None: any dtype, and autograd casts nothing. What comes from elsewhere stays FP32.
            wanted = self.dtype if scale is None else None
            if master.grad_dtype is not wanted and (master.grad is None or wanted is None):
                master.grad_dtype = wanted

    def _set_scale(self, scale: LossScale | None) -> None:
        if scale is not self.scale:
            self.scale = scale
            parameters.changed()

    def widen(self, master: torch.Tensor) -> None:
        """Store the gradient that is there, and those to come, in FP32 and true to size."""
        grad = master.grad
        if master.grad_dtype is torch.float32:
            return
        if grad is not None and grad.dtype is self.dtype:
            if self._was_changed(grad) and bool(grad.any()):  # zeroed is as good as true
                self._refuse_changed()
            grad = grad.float() if self.stored is None else self.stored.true(grad)
        master.grad = None
        master.grad_dtype = torch.float32
        master.grad = grad
        self.stored = None

    # -- in a backward --------------------------------------------------------------------------

    def hand_over(
        self,
        grad: torch.Tensor,
        multiplied: Multiplied | None,
        node: Any,
        *,
        low: bool,
        keeper: Any,
    ) -> torch.Tensor | None:
        """One graph's gradient: what to return to autograd for it.

        Args:
            multiplied: what the graph multiplied it by, or None: it is true to size.
            node: the AccumulateGrad of the parameter.
            low: store it in the low dtype, if nothing else stands against that.
            keeper: what keeps the parameter alive as long as gradients are stored low.
        """
        master = self._master()
        stores = _stores(node)
        if master is None or stores is False:
            return None
        before = master.grad
        wanted = self.dtype if multiplied is None else None
        fits = before is None or before.dtype is self.dtype
        if not (low and stores and fits and master.grad_dtype is wanted):
            if stores:
                self.widen(master)
            return grad.float() if multiplied is None else multiplied.true(grad)
        if multiplied is None:
            return grad
        self._look_at(node, keeper)
        task = torch._C._current_graph_task_id()  # as torch.utils.checkpoint does
        if task not in self._aside:
            self._aside[task] = grad, multiplied
            return self._zero
        others, by = self._aside[task]
        self._aside[task] = others + by.bring(grad, multiplied), by
        return None

    def _look_at(self, node: Any, keeper: Any) -> None:
        """Be called by this AccumulateGrad; a parameter gets a new one when nobody holds it."""
        if node.metadata.get("mpcompile") is not self:
            node.metadata["mpcompile"] = self
            node.register_prehook(self._arrive)
            node.register_hook(lambda *_: self.note_arrival())
        # It holds its parameter: we may not hold it, or neither would ever be freed.
        optimizers.state_of(keeper).nodes[id(self)] = node

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _arrive(self, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor] | None:
        """Autograd is about to store this: give what to store instead, or None for just this."""
        aside = self._aside.pop(torch._C._current_graph_task_id(), None)
        master, arrived = self._master(), gradients[0]
        if arrived is None or master is None:
            return None
        if arrived is self._zero:
            before = master.grad
            if aside is None or not (before is None or before.dtype is self.dtype):
                raise MPCompileError(
                    f"two backwards that ran at once both reached an O2 parameter of shape "
                    f"{self._shape}, whose gradient is stored in FP16 times the loss scale; use "
                    "level='O1', or dtype=torch.bfloat16"
                )
            grad, by = aside
            if before is None or self.stored is None:
                self.stored = by
            elif self._was_changed(before) and _is_known_nonzero(before):
                self._refuse_changed()
            if before is not None and self.stored.moves != by.moves:
                self.restate(before, Multiplied.least([self.stored, by]))
            return (self.stored.bring(grad, by),)
        if arrived.dtype is self.dtype:
            raise MPCompileError(
                f"a half gradient from outside the compiled model reached an O2 parameter of "
                f"shape {self._shape}, whose own is stored in FP16 times the loss scale: the sum "
                "would be wrong. Return FP32 there, or compute it inside the compiled model, or "
                "use level='O1'"
            )
        self.widen(master)
        return None if aside is None else (arrived + aside[1].true(aside[0]),)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note_arrival(self) -> None:
        """The gradient that is there now is as it was stored: see `check_untouched`."""
        master = self._master()
        if master is not None and master.grad is not None:
            self._arrived = weakref.ref(master.grad), master.grad._version

    # -- in a step ------------------------------------------------------------------------------

    def is_scaled(self, grad: torch.Tensor | None) -> bool:
        """Whether this gradient of the parameter is one that we stored scaled."""
        return self.stored is not None and grad is not None and grad.dtype is self.dtype

    def check_untouched(self, grad: torch.Tensor) -> None:
        """Refuse a scaled gradient that somebody changed since it arrived.

        Raises:
            MPCompileError: says what to do instead.
        """
        if self._was_changed(grad) and bool(grad.any()):  # zeroed is as good as true
            self._refuse_changed()

    def _was_changed(self, grad: torch.Tensor) -> bool:
        seen = self._arrived
        return self.stored is not None and (
            seen is None or seen[0]() is not grad or seen[1] != grad._version
        )

    def _refuse_changed(self) -> NoReturn:
        raise MPCompileError(
            f"the gradient of an O2 parameter of shape {self._shape} was changed between "
            "backward() and step(). It is stored in FP16 times the loss scale, so a threshold "
            "or a term meant for true gradients is off by that factor. To clip, use "
            "MPOptimizer(..., max_grad_norm=...); otherwise level='O1' or dtype=torch.bfloat16"
        )

    def restate(self, grad: torch.Tensor, by: Multiplied) -> None:
        """Bring the stored gradient to another scale, in place, where that is another number."""
        if self.stored is not None and self.stored.moves != by.moves:
            grad.copy_(by.bring(grad, self.stored))
            self.stored = by
            self.note_arrival()


def on_one_scale(gradients: Sequence[tuple[LowGradient, torch.Tensor]]) -> torch.Tensor:
    """What all of these stored gradients of one loss scale are multiplied by, from now on.

    Raises:
        MPCompileError: one was changed since it arrived.
    """
    for low, grad in gradients:
        low.check_untouched(grad)
    common = Multiplied.least([low.stored for low, _ in gradients if low.stored is not None])
    for low, grad in gradients:
        low.restate(grad, common)
    return common.by


def _is_known_nonzero(gradient: torch.Tensor) -> bool:
    """Whether some element is not 0; False where the host would have to wait for the device."""
    return not capabilities(gradient.device).asynchronous and bool(gradient.any())


def _stores(node: Any) -> bool | None:
    """Whether the backward that runs now will store something in this node's parameter. None: no,
    it returns the gradient (`torch.autograd.grad`).
    """
    try:
        stores: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # so it answers for a leaf whose gradient is returned
        return None
    return stores
