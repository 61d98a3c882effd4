"""Which values are read digit by digit: those from which an operator makes a whole number, a place,
a side or an angle (`digits` in the table), directly or through arithmetic that keeps dtypes.

    h: LOW = linear(x, w)       read
    p = mul(h, scale)           read
    floor = floor(p)            reads p to its last digit
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from .. import rules
from ..rules.policy import Precision
from .values import captured, float_args, hidden_calls, is_getitem, rule


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
