"""Compute in FP32 what feeds an operator that would make much of its rounding. Deciding passes. The
user's policy is never overruled.

**`guard_steep`**, for a difference or a bound that a steep operator reads; FOLLOW becomes FULL.

    p: FOLLOW = sigmoid(h)                     p: FULL = sigmoid(h)
    c: FOLLOW = minimum(p, 0.9999)      ->     c: FULL = minimum(p, 0.9999)
    q: FOLLOW = 1 - c                          q: FULL = 1 - c
    log: FULL = log(q)                         log: FULL = log(q)

A logarithm of what was rounded is hardly off: the rounding is relative. Not so if a number was
added in between: 0.999 is 1 in BF16, and nothing is left of 1 - 0.999. And a value that was rounded
to 1 lies beyond any bound below 1: it gets no gradient, or an infinite one. What the program names
itself (a number, a constant, data) it names to the last digit. So where the table says that every
digit of an operand counts for an FP32 operator (`digits`), and this operand was computed by adding
such a number to what came from a LOW operator, or by bounding that with it, all between the two is
FP32.

**`guard_factorisations`**, for matrix factorisations; LOW and FOLLOW become FULL.

    k: LOW = mm(x, xT)                           k: FULL = mm(x, xT)
    cholesky: FULL = linalg_cholesky(k)    ->    cholesky: FULL = linalg_cholesky(k)

Rounded to FP16, a positive definite matrix may get a negative eigenvalue, and a singular one full
rank: `cholesky` then raises, `pinv` returns 1e5 where it should return 1. FP32 inside the operator
comes too late. So its producers are pinned, up through FOLLOW nodes, to the first LOW operator on
each path. The operands of that one may be low: the product of rounded factors is an exact product.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from mpcompile import ir, rules
from mpcompile.rules.policy import Config, Level, Precision


def guard_steep(gm: fx.GraphModule, config: Config) -> bool:
    if config.level is Level.O3:
        return False
    read_by = _steep_readers(gm.graph)
    low = _computed_from_low(gm.graph) if read_by else set()
    for node, reader in read_by.items():
        if _hands_on(node) and _names_a_number(node, low):
            reason = f"{reader} reads it to the last digit"
            ir.remark(node, precision=Precision.FULL, by=ir.By.GUARD, reason=reason)
            ir.pin_producers(node, reason, products=False)
    return False


def _steep_readers(graph: fx.Graph) -> dict[fx.Node, str]:
    """What a steep operator reads, directly or through FOLLOW operators; by whom it is read."""
    found: dict[fx.Node, str] = {}
    for node in reversed(graph.nodes):
        rule = ir.rule(node)
        operands: Iterable[fx.Node] = ()
        if node in found and (_hands_on(node) or ir.is_getitem(node)):
            operands = node.all_input_nodes
        elif rule.precision is Precision.FULL is ir.precision(node):
            wanted = rules.places(node.target, rule.digits)
            operands = [n for i, n in ir.float_args(node) if i in wanted]
        name = found.get(node) or ir.op_name(node).removeprefix("aten::")
        found.update((n, name) for n in operands)
    return found


def _hands_on(node: fx.Node) -> bool:
    """Whether its result is as exact as what it reads: a FOLLOW operator, also if it was pinned."""
    follows = ir.rule(node).precision is Precision.FOLLOW
    return follows and ir.is_marked(node) and ir.mark(node).by is not ir.By.POLICY


def _computed_from_low(graph: fx.Graph) -> set[fx.Node]:
    def readers(node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if not ir.rule(user).creates]

    low = (node for node in graph.nodes if ir.precision(node) is Precision.LOW)
    return set(ir.reached(low, readers))


def _names_a_number(node: fx.Node, low: set[fx.Node]) -> bool:
    """Whether it adds to a value that was computed in a low dtype one that the program names, or
    bounds it by one.
    """
    rule = ir.rule(node)
    if not (rule.adds or rule.compares or ir.op_name(node) == "aten::where"):
        return False
    operands = [n for _, n in ir.float_args(node)]
    numbers = [number for number in ir.numbers(node, but="alpha") if number != 0]
    given = [n for n in operands if n not in low]
    return any(n in low for n in operands) and bool(numbers or given)


def guard_factorisations(gm: fx.GraphModule, config: Config) -> bool:
    if config.level is Level.O3:
        return False
    for node in gm.graph.nodes:
        if ir.rule(node).sensitive and ir.precision(node) is Precision.FULL:
            name = ir.op_name(node).removeprefix("aten::")
            reason = f"{name} reads it, and would multiply its rounding"
            ir.pin_producers(node, reason, products=True)
    return False
