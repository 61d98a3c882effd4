"""The memory that a value lies in, and the values that a node writes in place; and where the
elements of a value lie there, compared with where the program had them; and nodes that lay a value
out in another way.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from .. import rules
from ..torch_inside.tensors import storage_of
from .edit import insert, new_call
from .marks import Mark
from .shapes import Size, hint, known_equal
from .values import (
    aten,
    attribute,
    captured,
    is_getitem,
    is_op,
    is_opaque,
    op_name,
    positions,
    tensor,
    tensors_of,
    value,
)


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
            found += listed(argument)
    return found


def listed(argument: object) -> list[fx.Node]:
    """The nodes in an argument that is one, or a list of some."""
    several = argument if isinstance(argument, (list, tuple)) else [argument]
    return [a for a in several if isinstance(a, fx.Node)]


# From torch 2.13 on, Dynamo says which operands an autograd.Function marks as dirty.
_DIRTY_IS_TOLD = torch.__version__ >= "2.13"


def _marks_dirty(node: fx.Node) -> bool:
    """Whether an autograd.Function writes to its operands and says so (`mark_dirty`).

    Where Dynamo doesn't tell (torch 2.12): whether its forward writes anything in place.
    """
    if _DIRTY_IS_TOLD or not op_name(node).endswith("autograd_function_apply"):
        return "dirty_idx" in node.kwargs
    forward = attribute(node.graph.owning_module, node.args[0])  # type: ignore[arg-type]
    return any(map(written_by_name, forward.graph.nodes))


def written_by_name(node: fx.Node) -> list[fx.Node]:
    """The same in Dynamo's graph, by the name of what the node calls: `x.add_(y)`, `x += y`,
    `x[0] = y`, `inplace=True`, `out=`. What such a call returns is what it writes.
    """
    name = op_name(node)
    named = name.endswith("_") and not name.endswith("__")
    assigned = name == "__setitem__" or node.target in _ASSIGNMENTS
    if named or assigned or node.kwargs.get("inplace"):
        return listed(node.args[0] if node.args else node.kwargs.get("input"))
    return listed(node.kwargs.get("out"))


# What tensors do in place: `x @= y` makes a new one.
_ASSIGNMENTS = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv,
    operator.ifloordiv, operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor,
    operator.ilshift, operator.irshift,
}  # fmt: skip


# -- where elements lie ----------------------------------------------------------------------------


def has_own_memory(node: fx.Node) -> bool:
    """Whether the captured value lies in memory that this operator made, not in an operand's."""
    source = node.args[0] if is_getitem(node) else node
    assert isinstance(source, fx.Node)
    return not any(shares_memory(operand, source) for operand in source.all_input_nodes)


def lies_as_captured(node: fx.Node) -> bool:
    """Whether the value, if it is a strided tensor, has the strides that it was captured with."""
    now, then = tensor(node), captured(node)
    if now is None or then is None or not now.layout is then.layout is torch.strided:
        return True
    return now.dim() == then.dim() and _same_strides(now, then)


def same_places(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two strided tensors of one shape have their elements at the same places."""
    return _same_strides(a, b) and known_equal(a.storage_offset(), b.storage_offset())


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the strides are equal. (That of a dimension of one element says nothing.) A size that
    depends on values is a new symbol in each run of its operator: it counts as the same.
    """
    pairs = zip(a.shape, b.shape, strict=True)
    names = {_expression(x): _expression(y) for x, y in pairs}
    names = {x: y for x, y in names.items() if not x.is_number}

    def equal(x: Size, y: Size) -> bool:
        renamed = _expression(x).xreplace(names) == _expression(y)
        return known_equal(x, y) or bool(renamed)

    sizes = zip(b.shape, a.stride(), b.stride(), strict=True)
    return all(known_equal(size, 1) or equal(old, new) for size, old, new in sizes)


def _expression(size: Size) -> sympy.Expr:
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def is_dense(value: torch.Tensor) -> bool:
    """Whether its elements fill their memory, each at a place of its own, without gaps."""
    dense: bool = aten.is_non_overlapping_and_dense.default(value)
    return dense


FORCE_STRIDES = "prims::inductor_force_stride_order"
"""Inductor's operator for a value whose dimensions are to have the order of given strides."""


def laid_channels_last(image: fx.Node) -> fx.Node:
    """Insert after a 4-d value the same one with its channels innermost, as Inductor lowers it.
    Channels, height and width are numbers. Returns that node, which nothing reads yet.
    """
    strides = torch.empty_like(value(image), memory_format=torch.channels_last).stride()
    with image.graph.inserting_after(image):
        force = torch.ops.prims.inductor_force_stride_order.default
        return new_call(image.graph, force, image, list(strides))


def dense_in_order(node: fx.Node, like: torch.Tensor, name: str, decision: Mark) -> fx.Node:
    """Insert, at the graph's insertion point, a copy of a value that is dense, with its dimensions
    in the order of the strides of `like`. Returns the last of the nodes that make it.
    """
    order = sorted(range(like.dim()), key=lambda dim: -hint(like.stride()[dim]))
    back = [order.index(dim) for dim in range(len(order))]
    steps: Sequence[tuple[Any, tuple[Any, ...]]] = [
        (aten.permute.default, (order,)),
        (aten.contiguous.default, ()),
        (aten.permute.default, (back,)),
    ]
    if order == back == sorted(order):
        steps = steps[1:2]
    dense = node
    for target, args in steps:
        dense = insert(target, dense, *args, name=name, like=node, decision=decision)
    return dense
