"""The backward in the graph of a training step, and the form in which its gradients arrive.

A parameter's gradient may come in two parts: that of the parameter itself, FP32 and unscaled, and
that of each working copy which a forward read in its place, in the low dtype and scaled. A single
gradient of a copy that only steps read goes to them as it is. Everything else is made FP32 and
unscaled first.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..scaling.loss_scale import LossScale
from .forward import Ran, Read
from .parts import BACKWARD, STEP


@dataclass(frozen=True)
class Arrived:
    """A gradient as it arrives at a step, under a tracer.

    Attributes:
        grad: it: FP32 and unscaled, or as the gradient of a working copy.
        scale: the loss scale that it is multiplied by, or None.
        used: the value of that scale: 0-d FP32, or None.
        moves: how many steps came before that value was read: it is the same for equal numbers.
    """

    grad: torch.Tensor
    scale: LossScale | None = None
    used: torch.Tensor | None = None
    moves: int = 0

    def unscaled(self, dtype: torch.dtype) -> Arrived:
        """The same gradient in FP32, and unscaled. An overflow in it stays one."""
        assert self.used is not None
        return Arrived(self.grad.to(dtype) * self.used.reciprocal())


def on_one_scale(arrived: Sequence[Arrived], params: Sequence[torch.Tensor]) -> list[Arrived]:
    """The gradients for one step. Where a loss scale has moved between the forwards that two of
    them come from, only those of the first value stay scaled.
    """
    first: dict[LossScale, int] = {}
    found: list[Arrived] = []
    for one, param in zip(arrived, params, strict=True):
        if one.scale is not None and first.setdefault(one.scale, one.moves) != one.moves:
            one = one.unscaled(param.dtype)
        found.append(one)
    return found


@dataclass
class Backward:
    """What a backward gave.

    Attributes:
        arrived: a gradient for each of its inputs, or None.
        found: for each loss scale how many gradients overflowed: 0-d FP32.
    """

    arrived: list[Arrived | None]
    found: dict[LossScale, torch.Tensor]


def straighten(graph: fx.Graph) -> None:
    """Let steps read gradients where the backward gives them, in Dynamo's graph.

        grad = getitem(backward, 0)
        new = empty_like(p)              ->      grad = getitem(backward, 0)
        copy_(new, grad)                         take_step(0, [p], [grad])
        take_step(0, [p], [new])

    Only where nothing but steps reads the new tensor: no clipping, no second backward, no `p.grad`
    that is left behind.
    """
    for copy in graph.find_nodes(op="call_method", target="copy_"):
        new, grad = copy.args[0], copy.args[1]
        if (
            is_gradient(grad)
            and new.target is torch.empty_like
            and all(user is copy or user.target is STEP for user in new.users)
            and not copy.users
        ):
            graph.erase_node(copy)
            new.replace_all_uses_with(grad)
            graph.erase_node(new)


def is_gradient(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph is one of the gradients that a backward gives."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target is BACKWARD


def read_by_steps_alone(backward: fx.Node) -> set[int]:
    """The gradients (by index) of a backward that nothing but steps reads."""
    return {
        n.args[1]  # type: ignore[misc]
        for n in backward.users
        if n.target is operator.getitem and all(user.target is STEP for user in n.users)
    }


def read_at_all(backward: fx.Node) -> set[int]:
    """The gradients (by index) of a backward that anything reads."""
    return {n.args[1] for n in backward.users if n.target is operator.getitem and n.users}  # type: ignore[misc]


def go_backward(
    losses: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    masters: Sequence[Any],
    read: set[int],
    direct: set[int],
    ran: Sequence[Ran],
    **options: Any,
) -> Backward:
    """The gradients of `losses` with respect to `inputs`, under a tracer.

    Args:
        masters: for each input the parameter that it stands for, or None.
        read: the inputs (by index) whose gradients anything reads. Of the others, one may have no
            history: what a program has made a leaf of, to take a gradient inside of its forward.
        direct: the inputs (by index) whose gradients only steps read.
        ran: the forwards that have run.
        options: of `torch.autograd.grad`.
    """
    reads = [
        (r, read, leaf)
        for r in ran
        for read, leaf in zip(r.forward.reads, r.leaves, strict=True)
        if leaf.requires_grad
    ]
    counts = {
        r.forward.scale: r.counter
        for r in ran
        if r.forward.scale is not None and r.counter is not None
    }
    own = [x for i, x in enumerate(inputs) if x.requires_grad or i in read]
    wanted = [*own, *(leaf for *_, leaf in reads), *counts.values()]
    given: Sequence[Any] = torch.autograd.grad(losses, wanted, allow_unused=True, **options)
    gradients, rest = iter(given[: len(own)]), given[len(own) :]
    of_copies, overflows = rest[: len(reads)], rest[len(reads) :]
    found = {s: n.detach() for s, n in zip(counts, overflows, strict=True) if n is not None}
    arrived: list[Arrived | None] = []
    for i, (x, master) in enumerate(zip(inputs, masters, strict=True)):
        grad = next(gradients) if x.requires_grad or i in read else None
        scaled = [
            (r, read, g)
            for (r, read, _), g in zip(reads, of_copies, strict=True)
            if g is not None and read.master is master
        ]
        if grad is None and len(scaled) == 1 and i in direct and scaled[0][1].low:
            arrived.append(_as_stored(*scaled[0]))
            continue
        for one in scaled:
            true = _unscaled(*one, found)
            grad = true if grad is None else grad + true
        arrived.append(None if grad is None else Arrived(grad))
    return Backward(arrived, found)


def _as_stored(ran: Ran, read: Read, grad: torch.Tensor) -> Arrived:
    return Arrived(read.copy.real_part(grad, read.master), ran.forward.scale, ran.used, ran.moves)


def _unscaled(
    ran: Ran, read: Read, grad: torch.Tensor, found: dict[LossScale, torch.Tensor]
) -> torch.Tensor:
    """The gradient of a working copy in FP32. An overflow in it is counted in `found`."""
    true = read.copy.real_part(grad, read.master).to(read.master.dtype)
    if ran.used is None:
        return true
    true = true * ran.used.reciprocal()
    overflow = true.isfinite().logical_not().any().to(torch.float32)
    scale = ran.forward.scale
    assert scale is not None
    found[scale] = found[scale] + overflow if scale in found else overflow
    return true
