"""Where the elements of a value lie in memory, compared with where the program had them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from .edit import insert, new_call
from .marks import Mark
from .memory import shares_memory
from .shapes import Size, hint, known_equal
from .values import aten, captured, is_getitem, tensor, value


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
