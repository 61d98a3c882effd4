"""Values that an operator reads so exactly that a rounding would show.

**`read_by_digit`**: those from which an operator makes a whole number, a place, a side or an angle
(`digits` in the table), directly or through arithmetic that keeps dtypes.

    h: LOW = linear(x, w)       read
    p = mul(h, scale)           read
    floor = floor(p)            reads p to its last digit

**`compared`**: those of which an operator compares the elements with what was picked from them.

    h: f16 = gelu(linear)                  read twice: the comparison may find them equal
    k: f16 = topk(h, 5)[0][..., -1:]
    keep = ge(h, k)

A compiler that fuses `gelu` with `ge` hands `h` on without its rounding, while `k` was picked from
the rounded values in memory: then `ge` is false at the element that `k` is. The backward of `amax`
looks for the maximum in its operand in the same way, and the operand may have been computed again.
A value in FP32 has no rounding to lose, but may be computed twice, in a vector and one by one, by
functions whose last digits differ.

What is picked (`picks` in the table: maxima, views, gathers, sorts, clamps) is exact in any dtype,
and so is a cast to a wider one. So if two compared values come, by such operators alone, from one
value, it is enough that all read that value from memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

import torch
from torch import fx
from torch.fx.node import map_arg

from .. import rules
from ..rules.policy import Precision
from ..torch_inside.graphs import schema
from .edit import argument, reached
from .marks import Role, role
from .memory import has_own_memory, storage, written
from .values import (
    captured,
    float_args,
    hidden_calls,
    is_getitem,
    kind,
    positions,
    requires_grad,
    rule,
    tensor,
)


def read_by_digit(graph: fx.Graph) -> set[fx.Node]:
    """The values, up to and including the operators whose own dtype the table decides."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        found.update(_handed_on(node) if node in found else _digits_of(node))
    return found


def _handed_on(node: fx.Node) -> Iterable[fx.Node]:
    """The operands that have as many digits as the result is to have."""
    if is_getitem(node):
        return node.all_input_nodes
    if rule(node).precision is Precision.FOLLOW or rule(node).converts:
        return [operand for _, operand in float_args(node)]
    return _digits_of(node)


def _digits_of(node: fx.Node) -> Iterable[fx.Node]:
    known = map(rules.rule_named, hidden_calls(node))
    if any(row.digits and not row.converts for row in known):
        return [operand for _, operand in float_args(node)]
    if rule(node).converts and not _keeps_more(node):
        return ()
    wanted = rules.places(node.target, rule(node).digits)
    return [operand for position, operand in float_args(node) if position in wanted]


def _keeps_more(node: fx.Node) -> bool:
    """Whether a conversion is to whole numbers or to FP64, and not to another floating dtype."""
    value = captured(node)
    if value is None or value.dtype is torch.bool:
        return False
    return value.dtype is torch.float64 or not value.dtype.is_floating_point


_LOW = 2  # bytes of an element


def compared(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each operator that compares, with each value of which it compares elements with what was
    picked from it, and which isn't put into memory. Inputs are in memory. Memory that the program
    writes in place can't be copied.
    """
    written_to: set[int | None] | None = None
    for node in graph.nodes:
        for value in dict.fromkeys(_values(node)):
            if value.op in ("placeholder", "get_attr") or role(value) is Role.KEPT:
                continue
            if written_to is None:
                written_to = {storage(target) for call in graph.nodes for target in written(call)}
            if storage(value) is None or storage(value) not in written_to:
                yield node, value


def _values(node: fx.Node) -> Iterator[fx.Node]:
    row = rule(node)
    if row.finds and _looks_again(node):
        for operand in _operands(node, rules.places(node.target, row.finds)):
            everything = _picked_from(operand)
            if any(map(requires_grad, everything)):
                yield from _nearest(operand, everything)
    if row.compares:
        operands = _operands(node, rules.places(node.target, row.compares))
        for one, other in combinations(dict.fromkeys(operands), 2):
            shared = _picked_from(one) & _picked_from(other)
            for operand in (one, other) if shared else ():
                yield from _nearest(operand, shared)


def _operands(node: fx.Node, places: frozenset[int] | None = None) -> list[fx.Node]:
    """The floating-point operands, or those at some positions in the operator's schema."""
    found: list[fx.Node] = []
    for position, given in positions(node):
        if places is None or position in places:
            map_arg(given, found.append)
    return [n for n in found if is_getitem(n) or (t := tensor(n)) is None or t.is_floating_point()]


def _looks_again(node: fx.Node) -> bool:
    """Whether the backward finds the result in an operand, by what else the operator is told."""
    names = {declared.name for declared in schema(node.target).arguments}
    for order in {"p", "ord"} & names:
        return argument(node, order) in (float("inf"), -float("inf"))
    return "reduce" not in names or argument(node, "reduce") in ("amax", "amin", "max", "min")


def _picked_from(node: fx.Node) -> set[fx.Node]:
    """The value, and all those whose elements it may hold, unrounded."""
    return set(reached([node], _sources))


def _sources(node: fx.Node) -> list[fx.Node]:
    """The operands whose elements the value holds."""
    if is_getitem(node) or kind(node) is not rules.Kind.COMPUTE or rule(node).picks:
        return _operands(node)
    now = tensor(node)
    if now is None or not rule(node).converts:
        return []
    operands = _operands(node)[:1]  # `type_as` reads a second one, for its dtype
    before = tensor(operands[0]) if operands else None
    exact = before is not None and torch.promote_types(before.dtype, now.dtype) is now.dtype
    return operands if exact else []


def _nearest(node: fx.Node, among: set[fx.Node]) -> Iterator[fx.Node]:
    """The values, among some, from which the elements of a value come: on each way the first one
    that is in the low dtype and no view of another, else the one that computes them.
    """

    def beyond(value: fx.Node) -> list[fx.Node]:
        """The values that this one's elements come from; none where it is one of those sought."""
        is_view = captured(value) is not None and not has_own_memory(value)
        now = tensor(value)
        is_low = now is not None and now.dtype.itemsize <= _LOW and not is_view
        if is_low and value in among:
            return []
        return _sources(value) or (_operands(value) if is_view else [])

    for value in reached([node], beyond):
        if value in among and tensor(value) is not None and not beyond(value):
            yield value
