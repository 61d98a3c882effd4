"""The memory that a value lies in, and the values that a node writes in place."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .. import rules
from ..torch_inside.tensors import storage_of
from .values import attribute, captured, is_op, is_opaque, op_name, positions, tensor, tensors_of


def storage(node: fx.Node) -> int | None:
    """Identity of the memory of the captured value; equal for aliases."""
    return next(iter(memory(captured(node))), None)


def storage_now(node: object) -> int | None:
    """The same of the value that a node has now; None of what is no node."""
    return next(iter(memory(tensor(node))), None) if isinstance(node, fx.Node) else None


def shares_memory(a: fx.Node, b: fx.Node) -> bool:
    """Whether two captured values, or parts of them, lie in the same memory."""
    return not memory(a.meta.get("mp_captured")).isdisjoint(memory(b.meta.get("mp_captured")))


def memory(value: Any) -> set[int]:
    """Identities of the memory of a value or, if it is a sequence, of its parts."""
    strided = (t for t in tensors_of(value) if t.layout is torch.strided)
    return {storage_of(t) for t in strided}


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments of the node that it writes in place."""
    if is_opaque(node):
        # Of a function of the user's, assume that it writes.
        writes = _marks_dirty(node) if is_op(node) else True
        return list(node.all_input_nodes) if writes else []
    places = rules.written_args(node.target)
    found: list[fx.Node] = []
    for i, argument in positions(node):
        if i in places:  # a list, where it writes to many: `_foreach_mul_`
            listed = argument if isinstance(argument, (list, tuple)) else [argument]
            found += [a for a in listed if isinstance(a, fx.Node)]
    return found


# From torch 2.13 on, Dynamo says which operands an autograd.Function marks as dirty.
_DIRTY_IS_TOLD = torch.__version__ >= "2.13"


def _marks_dirty(node: fx.Node) -> bool:
    """Whether an autograd.Function writes to its operands and says so (`mark_dirty`).

    Where Dynamo doesn't tell (torch 2.12): whether its forward writes anything in place.
    """
    if _DIRTY_IS_TOLD or not op_name(node).endswith("autograd_function_apply"):
        return "dirty_idx" in node.kwargs
    forward = attribute(node.graph.owning_module, node.args[0])  # type: ignore[arg-type]
    return any(_is_a_write(n) for n in forward.graph.nodes if n.op.startswith("call"))


def _is_a_write(node: fx.Node) -> bool:
    """Whether an untraced call writes: `x.add_(y)`, `x += y`, `x[0] = y`, `out=`, `inplace=`"""
    name = node.target if isinstance(node.target, str) else op_name(node)
    named = name.endswith("_") and not name.startswith("__")
    assigned = name == "__setitem__" or node.target in ASSIGNMENTS
    return named or assigned or bool(node.kwargs.get("inplace")) or "out" in node.kwargs


ASSIGNMENTS = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv,
    operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul, operator.iand,
    operator.ior, operator.ixor, operator.ilshift, operator.irshift,
}  # fmt: skip
