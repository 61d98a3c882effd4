"""Dynamo graph -> pre-dispatch ATen graph, ready for the passes: the entry of this room.

Dynamo gives a backend torch functions, tensor methods and higher-order operators. We replay that
graph under `make_fx(pre_dispatch=True)`. The result is one finite vocabulary of ATen operators. It
is still above autograd (AOTAutograd derives the backward from the rewritten graph) and above the
choice of an attention kernel (which depends on the dtypes that the passes choose).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from .. import ir
from ..errors import CannotRewrite
from ..ir import attribute, is_op, op_name, requires_grad, rule, storage, written
from ..ir.fakes import fake_twin, like
from ..ir.targets import SET_GRAD_ENABLED
from ..ir.values import is_foreign
from ..rules import UNKNOWN
from ..torch_inside.graphs import schema
from ..torch_inside.names import (
    FakeTensor,
    OpOverload,
    allow_saved_hooks,
    autocast_off,
    forbid_saved_hooks,
    is_traceable_wrapper_subclass,
    saved_hooks_forbidden,
)
from .place import ReplayState, record_modes
from .provenance import complete_module_paths, copy_provenance, source
from .replay import Replay
from .surroundings import Around


def capture(
    gm: fx.GraphModule, inputs: Sequence[Any], around: Around, low: torch.dtype | None = None
) -> fx.GraphModule:
    """Replay Dynamo's graph as pre-dispatch ATen.

    A program whose parameters are stored in the low dtype is captured as if they were FP32, and all
    that the program computes of them: so the passes decide alike for it. Its inputs keep the dtype
    that they have (`ir.is_low_input`), and so do its results, but for FP16 ones that need a
    gradient.

    Args:
        gm: the graph that Dynamo passed to the backend.
        inputs: its inputs: tensors and SymInts, one for each placeholder.
        around: what stood around it then.
        low: the low dtype of the graph.

    Returns:
        A graph with the same placeholders (names, sources, static marks) and outputs. Each node's
        `meta["val"]` and `meta["mp_captured"]` hold its FakeTensor in the FP32 program.

    Raises:
        CannotRewrite: the graph holds something that can't be replayed exactly; says what.
    """
    for value in inputs:
        if is_traceable_wrapper_subclass(value):
            raise CannotRewrite(f"an input is a tensor subclass ({type(value).__name__})")

    fakes = [fake_twin(value, around.fakes) for value in inputs]
    stored = {i: fakes[i] for i in _stored_low(inputs, low)}
    with around.mode:
        for i, fake in stored.items():
            fakes[i] = like(fake, dtype=torch.float32).requires_grad_(fake.requires_grad)
    place = ReplayState(
        around.devices, [(*one, True) for one in around.autocasts], stored=low if stored else None
    )
    with autocast_off(), fx_traceback.preserve_node_meta(), around.mode, _modes_kept():
        traced = make_fx(
            lambda *args: tuple(Replay(gm, place).run(*args)),
            pre_dispatch=True,
            tracing_mode="real",  # the inputs are fake already, with their symbols
            _allow_non_fake_inputs=True,
        )(*fakes)
    copy_provenance(gm, traced)
    complete_module_paths(traced, inputs, around.names)
    _note_inputs(traced, inputs)
    record_modes(traced.graph, around)
    # Not eliminate_dead_code(): it changes bodies too, where it takes `x.add_(y)` for dead code.
    for node in reversed(traced.graph.nodes):
        superseded = node.target is SET_GRAD_ENABLED and node.next.target is SET_GRAD_ENABLED
        if not node.users and (superseded or not _is_impure(node)):
            traced.graph.erase_node(node)
    for node in traced.graph.nodes:
        node.meta["mp_captured"] = _seen(traced, node).meta.get("val")
    _store_low(traced, stored)
    traced.meta["mp_output_memory"] = _output_memory(traced)
    return traced


def _stored_low(inputs: Sequence[Any], low: torch.dtype | None) -> list[int]:
    """The inputs (by number) in the low dtype, if parameters are stored in it; else none: then the
    program has its own reasons to name that dtype.
    """
    if low is None or not any(isinstance(x, torch.nn.Parameter) and x.dtype is low for x in inputs):
        return []
    return [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.dtype is low]


def _store_low(traced: fx.GraphModule, stored: Mapping[int, torch.Tensor]) -> None:
    """Give inputs the dtype that they are stored in.

    Raises:
        CannotRewrite: the numbers would be those of another program: one of them is written, or an
            operator without a rule, which may know that dtype alone, is given FP32 now.
    """
    if not stored:
        return
    inputs = traced.graph.find_nodes(op="placeholder")
    memory = {storage(inputs[i]): inputs[i] for i in stored}
    for node in filter(is_op, traced.graph.nodes):
        if is_foreign(node) and rule(node) is UNKNOWN:
            raise CannotRewrite(f"{op_name(node)} has no rule, and weights are stored low")
        for target in written(node):
            if (written_to := memory.get(storage(target))) is not None:
                raise CannotRewrite(f"it writes to {written_to.name}, which is stored low")
    for i, fake in stored.items():
        ir.stored.set(inputs[i], fake)
    if any(fake.dtype is torch.float16 for fake in stored.values()):
        # The gradients that enter are multiplied by the loss scale after the results: in FP16,
        # small ones would be zero before. So results that need a gradient are FP32.
        known = traced.meta["mp_output_dtypes"]
        results: list[Any] = list(traced.graph.output_node().args[0])  # type: ignore[arg-type]
        traced.meta["mp_output_dtypes"] = [
            None if isinstance(result, fx.Node) and requires_grad(result) else dtype
            for result, dtype in zip(results, known, strict=True)
        ]


def _note_inputs(traced: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Note which inputs are parameters, and which are gradients of the caller's."""
    for value, node in zip(inputs, traced.graph.find_nodes(op="placeholder"), strict=True):
        ir.is_parameter.set(node, isinstance(value, torch.nn.Parameter))
        ir.is_gradient.set(node, source(node).endswith(".grad"))


def _seen(traced: fx.GraphModule, node: fx.Node) -> fx.Node:
    """The node. Raises `CannotRewrite` if a value of the program became a constant of the graph: an
    operation that the tracer doesn't see has made it.
    """
    if node.op == "get_attr" and isinstance(attribute(traced, node), FakeTensor):
        raise CannotRewrite("a tensor in it is made unseen by the tracer (such as `x.data`)")
    return node


@contextlib.contextmanager
def _modes_kept() -> Iterator[None]:
    """Restore modes that a failed replay leaves changed: no_grad, and functorch's ban of hooks on
    saved tensors.
    """
    forbidden = saved_hooks_forbidden()
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            yield
        finally:
            if forbidden is None:
                allow_saved_hooks()
            else:
                forbid_saved_hooks(forbidden)


def _is_impure(node: fx.Node) -> bool:
    """Whether dead-code elimination must keep it: a write, a mode switch, an opaque or random call.

    A body may write to its operands, so a higher-order operator always stays. Batch norm in
    training writes its running statistics, which its schema doesn't say; its users keep it alive.
    """
    if node.op in ("placeholder", "output"):
        return True
    if isinstance(node.target, OpOverload):
        return schema(node.target).is_mutable or node.is_impure()
    return node.op != "get_attr"


def _output_memory(traced: fx.GraphModule) -> list[int | None]:
    """For each result, the identity of its memory: equal for results that share memory, with each
    other or with an input.
    """
    results: list[Any] = list(traced.graph.output_node().args[0])  # type: ignore[arg-type]
    return [storage(result) if isinstance(result, fx.Node) else None for result in results]
