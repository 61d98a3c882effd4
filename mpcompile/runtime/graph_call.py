"""A call of one compiled graph: its extra inputs are added to those of the caller.

Dynamo passes the inputs of the graph that it traced. The rewritten graph may read working copies in
place of parameters, and the loss scale (`ir/inputs.py`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ..ir.inputs import GraphInputs
from ..scaling import agreement, guard
from ..scaling.copies import Reader, read_in_full
from ..scaling.kept_copies import KeptCopies
from ..scaling.loss_scale import LossScale
from ..torch_inside.distributed import active_ddp
from .repair import Repairable, repair
from .witness import check_constants

__all__ = ["is_leaf", "noticing_ddp", "reading", "reading_in_full", "scaled"]

Function = Callable[..., Any]


def reading(compiled: Function, inputs: GraphInputs, reader: Reader | KeptCopies) -> Function:
    """Hand a graph without a loss scale its copies of weights."""
    masters = tuple(inputs.copies.values())

    def call(*args: Any) -> Any:
        copies = reader.read([args[i] for i in masters])
        return compiled(*inputs.assembled(args, copies))

    return call


def reading_in_full(compiled: Function, inputs: Sequence[int]) -> Function:
    """Note, of each module that the graph is run for, which parameters it reads in FP32."""

    def call(*args: Any) -> Any:
        read_in_full([args[i] for i in inputs])
        return compiled(*args)

    return call


def scaled(
    compiled: Function,
    inputs: GraphInputs,
    reader: Reader | None,
    scale: LossScale,
    examples: Sequence[Any],
    device: torch.device,
    repairable: Repairable | None,
    constant: Collection[int],
) -> Function:
    """Hand a graph its loss scale, and its working copies; tell optimizers of its parameters which
    scale it is.

    Args:
        compiled: takes all inputs of the rewritten graph.
        inputs: which input of the rewritten graph is what.
        reader: provides the working copies; None where the graph reads none.
        examples: the caller's inputs that the graph was compiled with.
        device: the device on which the graph reads the scale.
        repairable: notes a call after steps were skipped; None: nothing is repaired.
        constant: the results that no gradient enters.
    """
    masters = tuple(inputs.copies.values())
    watch = _Watch(examples, scale)
    in_a_row = scale.in_a_row
    if repairable is not None:
        in_a_row.repair = functools.partial(repair, scale)
    is_first = True

    def call(*args: Any) -> Any:
        nonlocal is_first
        watch.see(args)
        scale.saw_forward()
        given: Sequence[Any] = (*args, *scale.inputs(device))
        if reader is not None:
            copies = reader.read([args[i] for i in masters])
            given = inputs.assembled(args, copies, given[-2:])
        noted = repairable.note(given) if in_a_row.pending and repairable is not None else None
        results = compiled(*given)
        if noted is not None:
            noted.gave(results)
            in_a_row.calls.append(noted)
        if is_first:
            is_first = False
            check_constants(results, constant)
        return results

    return call


class _Watch:
    """Tells optimizers which scale the gradients of a graph's parameters depend on. Dynamo may run
    the graph with the parameters of equal modules in turn, so those of several are known.

    Args:
        examples: the caller's inputs that the graph was compiled with.
        scale: the scale.
    """

    def __init__(self, examples: Sequence[Any], scale: LossScale) -> None:
        self._leaves = [i for i, x in enumerate(examples) if is_leaf(x)]
        self._scale = scale
        # By the first one's id: all of them, and whether FSDP still uses their shards.
        self._known: dict[
            int, tuple[list[weakref.ref[torch.Tensor]], list[Callable[[], bool]]]
        ] = {}
        self._tell(examples)

    def see(self, args: Sequence[Any]) -> None:
        """The graph is about to run with these inputs."""
        leaves = self._leaves
        if not leaves:
            return
        refs, current = self._known.get(id(args[leaves[0]]), ((), ()))
        same = bool(refs) and all(ref() is args[i] for ref, i in zip(refs, leaves, strict=True))
        if not (same and all(is_current() for is_current in current)):
            self._tell(args)

    def _tell(self, args: Sequence[Any]) -> None:
        now, known = [args[i] for i in self._leaves], self._known
        shards = guard.watch(list(filter(is_leaf, now)), self._scale)
        self._scale.open |= any(map(_is_computed, args))
        for key in [key for key, (refs, _) in known.items() if refs[0]() is None]:
            del known[key]
        if now:
            known[id(now[0])] = [weakref.ref(x) for x in now], [s.is_current() for s in shards]


def noticing_ddp(call: Function, scale: LossScale | None) -> Function:
    """Wrap what Dynamo calls: it may run in the forward of a DistributedDataParallel, which only
    that forward tells (`mpcompile/ranks/ddp.py`), so each graph asks in each call.
    """

    def run(*args: Any) -> Any:
        module = active_ddp()
        if module is not None and torch.is_grad_enabled():
            agreement.enter_ddp(module, scale)
        return call(*args)

    return run


def is_leaf(value: Any) -> bool:
    """Whether autograd stores a gradient in `value.grad`."""
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _is_computed(value: Any) -> bool:
    """Whether a gradient goes on to what comes before."""
    return isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf
