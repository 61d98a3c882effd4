"""A call of one compiled graph: its extra inputs are added to those of the caller.

Dynamo passes the inputs of the graph that it traced. The rewritten graph may read working copies in
place of parameters, and the loss scale (`ir/inputs.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import MPCompileError
from ..ir.inputs import GraphInputs
from ..scaling import agreement, fit_scale, guard
from ..scaling.copies import Reader, read_in_full
from ..scaling.kept_copies import KeptCopies
from ..scaling.loss_scale import LossScale
from ..scaling.parameters import Derived, is_leaf, is_trained, own_again
from ..scaling.stays_finite import watching
from ..torch_inside.distributed import active_ddp
from ..torch_inside.modules import Names
from ..torch_inside.tensors import mark_of, version
from .repair import NotedCall, Repairable, repair

Function = Callable[..., Any]


@dataclass(frozen=True)
class Emitted:
    """A graph that was emitted, and what its calls depend on. No wrapper keeps it: it holds the
    caller's first inputs.

    Attributes:
        examples: the caller's inputs that it was compiled with.
        device: the device on which it reads its scale.
        names: the names of the model's parameters.
        inputs: which input of the rewritten graph is what.
        scale: its loss scale, or None.
        reader: provides the copies of weights; None where it reads none.
        in_full: the inputs that are an optimizer's parameters, and that it reads in FP32.
        searches: whether its backward passes can search for the scale.
        constant: the results that no gradient enters, where it has a scale.
        as_written: those of which what is infinite is so by the program.
        repairable: notes a call after steps were skipped; None: nothing is repaired.
    """

    examples: Sequence[Any]
    device: torch.device
    names: Names
    inputs: GraphInputs
    scale: LossScale | None = None
    reader: Reader | KeptCopies | None = None
    in_full: Sequence[int] = ()
    searches: bool = False
    constant: Collection[int] = ()
    as_written: Sequence[int] = ()
    repairable: Repairable | None = None


def wrapped(run: Function, made: Emitted) -> Function:
    """What was emitted, so that it is called as the graph that Dynamo traced."""
    for wrap, _ in WRAPPERS:
        run = wrap(run, made)
    return run


def _searching(run: Function, made: Emitted) -> Function:
    if made.scale is None or not made.searches:
        return run
    made.scale.search.possible = True
    return fit_scale.fitting(run, made.scale, made.inputs)


def _reading(run: Function, made: Emitted) -> Function:
    """Hand a graph without a loss scale its copies of weights."""
    inputs, reader = made.inputs, made.reader
    if made.scale is not None or reader is None:
        return run
    masters = tuple(inputs.copies.values())

    def call(*args: Any) -> Any:
        return run(*inputs.assembled(args, reader.read([args[i] for i in masters])))

    return call


def _reading_in_full(run: Function, made: Emitted) -> Function:
    """Note, of each module that the graph is run for, which parameters it reads in FP32."""
    if not (in_full := made.in_full):
        return run

    def call(*args: Any) -> Any:
        read_in_full([args[i] for i in in_full])
        return run(*args)

    return call


def _watching(run: Function, made: Emitted) -> Function:
    return run if made.scale is not None else watching(run, made.examples, made.names)


def _scaled(compiled: Function, made: Emitted) -> Function:
    """Hand a graph its loss scale and its copies; tell optimizers of its parameters the scale."""
    if made.scale is None:
        return compiled
    scale, reader, repairable, device = made.scale, made.reader, made.repairable, made.device
    inputs, constant = made.inputs, made.constant
    masters = tuple(inputs.copies.values())
    see = _telling(made.examples, scale)
    in_a_row = scale.in_a_row
    if repairable is not None:
        in_a_row.repair = functools.partial(repair, scale)
    is_first = True

    def call(*args: Any) -> Any:
        nonlocal is_first
        see(args)
        scale.saw_forward()
        given: Sequence[Any] = (*args, *scale.inputs(device))
        if reader is not None:
            copies = reader.read([args[i] for i in masters])
            given = inputs.assembled(args, copies, given[-2:])
        noted = NotedCall(repairable, given) if in_a_row.pending and repairable else None
        results = compiled(*given)
        if noted is not None:
            noted.gave(results)
            in_a_row.calls.append(noted)
        if is_first:
            is_first = False
            check_constants(results, constant)
        return results

    return call


def _noting_infinities(run: Function, made: Emitted) -> Function:
    """Note of results that what is infinite in them is no overflow (`module_call.keep_finite`)."""
    if not (as_written := made.as_written):
        return run

    def call(*args: Any) -> Any:
        results = run(*args)
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            for i in as_written:
                mark_of(results[i]).as_written = version(results[i])
        return results

    return call


def _telling(examples: Sequence[Any], scale: LossScale) -> Callable[[Sequence[Any]], None]:
    """Tell optimizers which scale the gradients of a graph's parameters depend on. Returns what
    tells it of the inputs of a call, if they are others.

    Args:
        examples: the caller's inputs that the graph was compiled with.
        scale: the scale.
    """
    leaves = [i for i, x in enumerate(examples) if is_leaf(x)]
    known = Derived()  # whether FSDP still uses their shards

    def tell(args: Sequence[Any]) -> None:
        now = [args[i] for i in leaves]
        own_again(now)
        shards = guard.watch(list(filter(is_leaf, now)), scale)
        scale.open |= any(is_trained(x) and not x.is_leaf for x in args)  # it goes on to others
        if now:
            known.note(now, [shard.is_current() for shard in shards])

    def see(args: Sequence[Any]) -> None:
        current = known.of([args[i] for i in leaves]) if leaves else ()
        if current is None or not all(is_current() for is_current in current):
            tell(args)

    tell(examples)
    return see


def _noticing_ddp(call: Function, made: Emitted) -> Function:
    """Wrap what Dynamo calls: it may run in the forward of a DistributedDataParallel, which only
    that forward tells (`mpcompile/ranks/ddp.py`), so each graph asks in each call.
    """
    scale = made.scale

    def run(*args: Any) -> Any:
        module = active_ddp()
        if module is not None and torch.is_grad_enabled():
            agreement.enter_ddp(module, scale)
        return call(*args)

    return run


def check_constants(results: Sequence[Any], constant: Collection[int]) -> None:
    """Raise MPCompileError if autograd tracks one of the results that no gradient should enter: it
    would enter without the loss scale, and leave divided by it.

    The scale stands at each result that may have a gradient (`passes/graph/scale_gradients.py`).
    Which ones may, a run on FakeTensors has told, and Dynamo's notes. This check reads neither:
    AOTAutograd, or autograd, has traced the emitted graph again.
    """
    tracked = [i for i in constant if torch.is_tensor(results[i]) and results[i].requires_grad]
    if tracked:
        numbers = ", ".join(map(str, tracked))
        raise MPCompileError(
            f"autograd tracks result {numbers} of a compiled graph, which mpcompile took for a "
            "constant: gradients would be divided by the loss scale. This is a bug of mpcompile; "
            'until it is mended, compile this model with loss_scale="none", or in BF16'
        )


# What a call is wrapped in, the innermost first, and why.
WRAPPERS: tuple[tuple[Callable[[Function, Emitted], Function], str], ...] = (
    (_searching, "the first backward with a finite gradient finds where the loss scale starts"),
    (_scaled, "the loss scale is an input, and so are copies; optimizers know the scale"),
    (_reading, "copies of weights are inputs, where there is no scale"),
    (_reading_in_full, "an optimizer knows which of its parameters are read in FP32"),
    (_noting_infinities, "a buffer that is replaced keeps infinities of the program's own"),
    (_watching, "a loss or gradient that stops being finite is said, where no scale counts it"),
    (_noticing_ddp, "each forward tells whether it runs in a DistributedDataParallel"),
)
