"""How the gradient of a parameter that has a working copy is stored.

It has the low dtype as long as only the parameter's MPOptimizer reads it; in FP16 it is also
multiplied by the loss scale. Autograd adds up all gradients that reach a parameter, and a scaled
gradient must not be added to an unscaled one. So the scaled gradient bypasses autograd: it is put
aside, and a zero that takes no memory goes through autograd in its place.

    a graph's backward: puts its scaled gradient aside  --zero-->  AccumulateGrad of the parameter

A hook sees the sum that arrived just before that node stores it. If it is that zero, all of the
gradient came out of our graphs, and the one put aside is stored, scaled. Otherwise a part of it
came from elsewhere (a penalty on the weights, a part of the model that runs uncompiled): then all
of it is stored in FP32 and unscaled, and a gradient stored earlier is converted. `p.grad.dtype`
tells which of the two was done.

A scaled gradient is stored with its multiplier. If the loss scale has moved since (another
optimizer of the same scale stepped in between), the gradient is rescaled.
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
from ..torch_inside.autograd import running_backward, version, will_run
from . import optimizers, parameters
from .loss_scale import LossScale


@dataclass(frozen=True)
class Multiplied:
    """The number that a gradient is multiplied by.

    Attributes:
        by: 0-d, on the device.
        moves: two of the same loss scale with equal `moves` are the same number.
    """

    by: torch.Tensor
    moves: int

    @classmethod
    def now(cls, scale: LossScale | None) -> Multiplied | None:
        """The multiplier of the forward that runs now, or None."""
        if scale is None or scale.used is None:
            return None
        moves = next(_unequal) if scale.used_apart else scale.live.moves
        return cls(scale.used, moves)

    def true(self, grad: torch.Tensor) -> torch.Tensor:
        return grad.float() * self.by.reciprocal()

    def bring(self, grad: torch.Tensor, other: Multiplied) -> torch.Tensor:
        """A gradient multiplied by `other`, rescaled to be multiplied by this instead."""
        return grad if other.moves == self.moves else grad * (self.by / other.by)

    def clipped(self, factor: torch.Tensor) -> Multiplied:
        """The multiplier of a stored gradient whose true value was multiplied by `factor`: the
        gradient itself need not be written.
        """
        return Multiplied(self.by / factor, next(_unequal))

    @classmethod
    def least(cls, found: Sequence[Multiplied]) -> Multiplied:
        """The smallest of several, at which all their gradients fit. The host doesn't read it."""
        distinct = list({m.moves: m for m in found}.values())
        if len(distinct) == 1:
            return distinct[0]
        return cls(torch.stack([m.by for m in distinct]).amin(), next(_unequal))


# Negative, so that no `moves` of a LiveScale equals one of these.
_unequal = itertools.count(-1, -1)


class LowGradient:
    """The gradient of one parameter, made by graphs that read its copy in `dtype`.

    Attributes:
        scale: the loss scale of these graphs, while gradients are stored scaled, or None.
        stored: the multiplier of `p.grad` while it has the low dtype and is scaled, or None.
    """

    def __init__(self, master: torch.Tensor, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.scale: LossScale | None = None
        self.stored: Multiplied | None = None
        self._master = weakref.ref(master)
        self._shape = tuple(master.shape)
        self._zero = torch.zeros((), dtype=dtype, device=master.device).expand(self._shape)
        self._aside: dict[int, tuple[torch.Tensor, Multiplied]] = {}  # by backward number
        self._arrived: tuple[weakref.ref[torch.Tensor], int] | None = None

    # -- in a forward ---------------------------------------------------------------------------

    def expect(self, master: torch.Tensor, scale: LossScale | None, *, low: bool) -> None:
        """Before a forward: store the gradient in the low dtype, or in FP32 and unscaled.

        Args:
            scale: the loss scale inside the graph, or None.
        """
        if self._aside and running_backward() == -1:
            self._aside.clear()  # left by a backward that failed: none is running
        self._set_scale(scale if low else None)
        if not low:
            self.widen(master)
        else:
            # None: any dtype, so autograd casts nothing; a gradient from elsewhere stays FP32.
            wanted = self.dtype if scale is None else None
            if master.grad_dtype is not wanted and (master.grad is None or wanted is None):
                master.grad_dtype = wanted

    def _set_scale(self, scale: LossScale | None) -> None:
        if scale is not self.scale:
            self.scale = scale
            parameters.changed()

    def widen(self, master: torch.Tensor) -> None:
        """Store the gradient that exists, and those to come, in FP32 and unscaled."""
        grad = master.grad
        if master.grad_dtype is torch.float32:
            return
        if grad is not None and grad.dtype is self.dtype:
            self.check_untouched(grad)
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
    ) -> torch.Tensor | None:
        """Take one graph's gradient. Returns what the graph's backward returns to autograd for it.

        Args:
            multiplied: the number that the graph multiplied it by, or None: it is unscaled.
            node: the AccumulateGrad of the parameter.
            low: store it in the low dtype, unless something else needs it in FP32.
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
        self._look_at(node, master)
        task = running_backward()
        if task not in self._aside:
            self._aside[task] = grad, multiplied
            return self._zero
        others, by = self._aside[task]
        self._aside[task] = others + by.bring(grad, multiplied), by
        return None

    def _look_at(self, node: Any, master: torch.Tensor) -> None:
        """Hook into this AccumulateGrad; a parameter gets a new one when none is referenced."""
        if node.metadata.get("mpcompile") is not self:
            node.metadata["mpcompile"] = self
            node.register_prehook(self._arrive)
            node.register_hook(lambda *_: self.note_arrival())
            # The node holds its parameter: if we held the node, neither would ever be freed.
            optimizers.state_of(parameters.owner_of(master)).nodes[id(self)] = node

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _arrive(self, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor] | None:
        """Called before autograd stores a gradient: return one to store instead, or None."""
        aside = self._aside.pop(running_backward(), None)
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
        """Note the gradient that was just stored, for `check_untouched`."""
        master = self._master()
        if master is not None and master.grad is not None:
            self._arrived = weakref.ref(master.grad), version(master.grad)

    # -- in a step ------------------------------------------------------------------------------

    def is_scaled(self, grad: torch.Tensor | None) -> bool:
        """Whether this gradient of the parameter is one that was stored scaled."""
        return self.stored is not None and grad is not None and grad.dtype is self.dtype

    def check_untouched(self, grad: torch.Tensor) -> None:
        """Refuse a scaled gradient that was changed since it arrived."""
        if self._was_changed(grad) and bool(grad.any()):  # zeros need no rescaling
            self._refuse_changed()

    def _was_changed(self, grad: torch.Tensor) -> bool:
        seen = self._arrived
        return self.stored is not None and (
            seen is None or seen[0]() is not grad or seen[1] != version(grad)
        )

    def _refuse_changed(self) -> NoReturn:
        raise MPCompileError(
            f"the gradient of an O2 parameter of shape {self._shape} was changed between "
            "backward() and step(). It is stored in FP16 times the loss scale, so a threshold "
            "or a term meant for true gradients is off by that factor. To clip, use "
            "mpcompile.clip_grad_norm_ or clip_grad_value_ in place of torch's, or "
            "MPOptimizer(..., max_grad_norm=...); otherwise level='O1' or dtype=torch.bfloat16"
        )

    def restate(self, grad: torch.Tensor, by: Multiplied) -> None:
        """Rescale the stored gradient in place to a multiplier, if that is another number."""
        if self.stored is not None and self.stored.moves != by.moves:
            grad.copy_(by.bring(grad, self.stored))
            self.stored = by
            self.note_arrival()


def on_one_scale(gradients: Sequence[tuple[LowGradient, torch.Tensor]]) -> torch.Tensor:
    """Bring all of these stored gradients of one loss scale to one multiplier, and return it.

    Raises:
        MPCompileError: one was changed since it arrived.
    """
    for low, grad in gradients:
        low.check_untouched(grad)
    first = gradients[0][0].stored
    if first is not None and all(low.stored is first for low, _ in gradients):
        return first.by  # as mostly: all come from one forward
    common = Multiplied.least([low.stored for low, _ in gradients if low.stored is not None])
    for low, grad in gradients:
        low.restate(grad, common)
    return common.by


def _is_known_nonzero(gradient: torch.Tensor) -> bool:
    """Whether some element is not 0; False if finding out would make the host wait."""
    return not capabilities(gradient.device).asynchronous and bool(gradient.any())


def _stores(node: Any) -> bool | None:
    """Whether the running backward will store a gradient in this node's parameter. None: it returns
    the gradient instead (`torch.autograd.grad`).
    """
    try:
        stores: bool = will_run(node)
    except RuntimeError:  # raised for a leaf whose gradient is returned
        return None
    return stores
