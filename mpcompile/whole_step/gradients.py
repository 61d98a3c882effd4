"""The backward in the graph of a training step, and the form in which its gradients arrive.

A parameter's gradient may come in two parts: that of the parameter itself, FP32 and unscaled, and
that of each working copy which a forward read in its place, in the low dtype and scaled: that is
made FP32 and unscaled. Without a scale, a single gradient of a copy that only steps read goes to
them as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..scaling.loss_scale import LossScale
from ..torch_inside.names import pytree
from .forward import CopyInput, TracedForward
from .parts import BACKWARD, STEP


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
            _is_gradient(grad)
            and new.target is torch.empty_like
            and all(user is copy or user.target is STEP for user in new.users)
            and not copy.users
        ):
            graph.erase_node(copy)
            new.replace_all_uses_with(grad)
            graph.erase_node(new)


def _is_gradient(node: fx.Node) -> bool:
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
    ran: Sequence[TracedForward],
    **options: Any,
) -> tuple[list[torch.Tensor | None], dict[LossScale, torch.Tensor]]:
    """The gradients of `losses` with respect to `inputs`, under a tracer.

    Args:
        masters: for each input the parameter that it stands for, or None.
        read: the inputs (by index) whose gradients anything reads. Of the others, one may have no
            history: what a program has made a leaf of, to take a gradient inside of its forward.
        direct: the inputs (by index) whose gradients only steps read.
        ran: the forwards that have run.
        options: of `torch.autograd.grad`.

    Returns:
        A gradient for each of the inputs, or None: FP32, or in the low dtype of a working copy that
        has no loss scale. And for each loss scale how many gradients overflowed: 0-d FP32. A
        gradient that steps alone read is not counted: they check it.
    """
    reads = _reads(ran)
    scaled = ((r.forward.scale, r.counter) for r in ran)
    counts = {scale: n for scale, n in scaled if scale is not None and n is not None}
    own = [x for i, x in enumerate(inputs) if x.requires_grad or i in read]
    wanted = [*own, *(leaf for *_, leaf in reads), *counts.values()]
    if options.get("grad_outputs") is None:
        options["grad_outputs"] = pytree.tree_map(_begin, losses)
    given: Sequence[Any] = torch.autograd.grad(losses, wanted, allow_unused=True, **options)
    gradients, rest = iter(given[: len(own)]), given[len(own) :]
    of_copies, overflows = rest[: len(reads)], rest[len(reads) :]
    found = {s: n.detach() for s, n in zip(counts, overflows, strict=True) if n is not None}
    arrived: list[torch.Tensor | None] = []
    for i, (x, master) in enumerate(zip(inputs, masters, strict=True)):
        grad = next(gradients) if x.requires_grad or i in read else None
        of_copy = [
            (r, read, g)
            for (r, read, _), g in zip(reads, of_copies, strict=True)
            if g is not None and read.master is master
        ]
        alone = grad is None and len(of_copy) == 1 and i in direct
        if alone and of_copy[0][1].low:
            arrived.append(of_copy[0][1].copy.real_part(of_copy[0][2], master))
            continue
        for r, of, g in of_copy:
            true, scale = _unscaled(r, of, g), r.forward.scale
            if scale is not None and not alone:
                overflow = true.isfinite().logical_not().any().to(torch.float32)
                found[scale] = found[scale] + overflow if scale in found else overflow
            grad = true if grad is None else grad + true
        arrived.append(grad)
    return arrived, found


def _begin(loss: torch.Tensor) -> torch.Tensor:
    return torch.ops.mpcompile.begin_backward.default(loss.detach())  # type: ignore[no-any-return]


def _reads(ran: Sequence[TracedForward]) -> list[tuple[TracedForward, CopyInput, torch.Tensor]]:
    """The copies whose gradients are wanted, each with the forward that read it and its leaf."""
    return [
        (r, read, leaf)
        for r in ran
        for read, leaf in zip(r.forward.reads, r.leaves, strict=True)
        if leaf.requires_grad
    ]


def _unscaled(ran: TracedForward, read: CopyInput, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a working copy in FP32. An overflow in it stays one."""
    true = read.copy.real_part(grad, read.master).to(read.master.dtype)
    return true if ran.used is None else true * ran.used.reciprocal()
