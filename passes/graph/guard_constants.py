"""Keep out of the low dtype values that it can't hold. A deciding pass; LOW and FOLLOW become FULL.

Captured constants may fit FP32 but not FP16. If they were rounded, eager mode would raise, or a
fully masked row would become NaN, or a division by zero would appear:

    masked_fill(scores, mask, -3.4e38)     below -65504: -inf, and NaN for a fully masked row
    add(norm, 1e-8)                        below 2**-24: zero
    clamp(p, max=1 - 1e-4)                 becomes 1, and log(1 - p) minus infinity
    arange(100) + offset                   99.97 becomes 100 (FP16 has 16 numbers between, BF16 2)

A value is *wide* if it may not survive the cast. Values become wide at such constants, at positions
and whole numbers, at integers turned into floats, at results that leave the range by nature (`exp`,
`sum`), and at O2 at data that enters the graph without a gradient (a mask, a table; its range is
unknown). A FOLLOW node with a wide operand is pinned FULL, and its result is wide, too, unless it
is bounded. Operators that compute in FP32 anyway end the chain.
What a bound close to 1 is applied to is pinned, too: rounded to 1 before, it would lie beyond the
bound, and get no gradient.
A LOW node takes a wide operand as autocast would, unless this is *exact*: integers, positions past
the last whole number of the low dtype (2048 in FP16, 256 in BF16), or any position where the
node's result is read digit by digit (`ir.read_by_digit`), as an angle is. Then the node is pinned.
Exact is no more what was computed from data, too (`h * mask`, `h / length`): rounding it loses no
more than rounding `h`. Whole numbers of what is trained (`(h * 8).round() / 8`) are no positions.
Nor is the result of a product exact, unless it is read digit by digit.
Integers that are zeros and ones (a mask, a one-hot) are exact in any dtype, and not wide.

The user's policy is never overruled.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import torch
from torch import fx

from mpcompile import ir, rules
from mpcompile.rules.policy import Config, Level, Precision
from mpcompile.torch_inside.names import OpOverload

_WIDE_INTEGERS = (torch.int64, torch.int32, torch.int16)


@dataclass(frozen=True)
class Wide:
    """Why a value may not survive the cast.

    Attributes:
        position: it holds positions or whole numbers, or was computed from them.
        exact: a LOW node must not read it either.
    """

    why: str
    position: bool = False
    exact: bool = False


_INTEGERS = Wide("integers that the low dtype can't tell apart", position=True)


def guard_constants(gm: fx.GraphModule, config: Config) -> bool:
    wide: dict[fx.Node, Wide] = {}
    by_digit = ir.read_by_digit(gm.graph)
    given = list(filter(ir.was_floating, gm.graph.find_nodes(op="placeholder")))
    data, trained = _computed_from(given), _computed_from(filter(ir.requires_grad, given))
    integers = _wide_integers(gm.graph)
    for node in gm.graph.nodes:
        found = _origin(node, gm, config, integers)
        read = [n for _, n in ir.float_args(node)]
        mixed = any(n in data for n in read)
        if found is not None and any(n in trained for n in read):
            found = replace(found, position=False)
        if found is None and ir.is_marked(node):
            found = _through(node, wide, integers, read_by_digit=node in by_digit)
            if found is not None and mixed and not _copies(node):
                found = replace(found, exact=False)
        if found is not None and any(True for _ in ir.tensors_of(node.meta.get("mp_captured"))):
            wide[node] = found
    return False


def _in_range(number: float, dtype: torch.dtype) -> bool:
    """Whether `dtype` holds a number's magnitude: zero, inf, nan, or a normal number."""
    info = torch.finfo(dtype)
    special = number == 0 or not math.isfinite(number)
    return special or bool(info.smallest_normal <= abs(number) <= info.max)


def _rounded(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))


def _on_edge(number: float, dtype: torch.dtype) -> bool:
    """Whether it becomes 1 or -1: a bound such as 1 - 1e-4 keeps a logarithm finite."""
    return abs(_rounded(number, dtype)) == 1 != abs(number)


def _fits(number: float, dtype: torch.dtype) -> bool:
    """Whether a number keeps its meaning in `dtype`."""
    return _in_range(number, dtype) and not _on_edge(number, dtype)


def _origin(
    node: fx.Node, gm: fx.GraphModule, config: Config, integers: Collection[fx.Node]
) -> Wide | None:
    """Why the node's value is wide by itself, or None."""
    if node.op == "placeholder":  # O1 computes with FP32 inputs in FP32, O3 has no rules
        trained = ir.requires_grad(node) or ir.is_parameter(node)
        is_data = config.level is Level.O2 and ir.was_f32(node) and not trained
        return Wide("data of unknown range") if is_data else None
    if node.op == "get_attr":
        constant = ir.attribute(gm, node)
        floating = isinstance(constant, torch.Tensor) and constant.is_floating_point()
        return _constant(constant, config.low) if floating else None
    if not ir.is_op(node):
        return None
    rule, floating = ir.rule(node), ir.was_floating(node)
    if rule.fill is not None:
        number = ir.argument(node, rule.fill)
        if isinstance(number, (int, float)) and not _fits(number, config.low):
            return Wide(f"constant {number:g}")
    if rule.makes_positions and floating:
        return _positions(node, config.low)
    if rule.converts and floating and node.args[0] in integers:
        return replace(_INTEGERS, exact=True)
    if rule.grows:
        return Wide(f"{ir.op_name(node).removeprefix('aten::')} can leave the low dtype's range")
    return None


def _wide_integers(graph: fx.Graph) -> set[fx.Node]:
    """The integers that may be others than zeros and ones, for all that the graph says."""
    wide: set[fx.Node] = set()
    bits: set[fx.Node] = set()
    for node in graph.nodes:
        value = ir.captured(node)
        if value is None:
            continue
        if value.dtype is torch.bool or (ir.is_op(node) and _zeros_and_ones(node, bits)):
            bits.add(node)
        elif value.dtype in _WIDE_INTEGERS:
            wide.add(node)
    return wide


def _zeros_and_ones(node: fx.Node, bits: Collection[fx.Node]) -> bool:
    """Whether a result holds nothing else, where these values don't."""
    rule = ir.rule(node)
    copies = _copies(node) or rule.converts or rule.zero_absorbs
    operands = [n for n in node.all_input_nodes if ir.captured(n) is not None]
    from_bits = bool(operands) and all(n in bits for n in operands)
    numbers = all(number in (0, 1) for number in ir.numbers(node))
    return rule.zeros_and_ones or (copies and from_bits and numbers)


def _copies(node: fx.Node) -> bool:
    """Whether each element of the result is one of an operand's."""
    return ir.kind(node) in (rules.Kind.VIEW, rules.Kind.MOVE) or ir.rule(node).picks


def _computed_from(given: Iterable[fx.Node]) -> set[fx.Node]:
    """The floating values that depend on these floating inputs."""
    return set(ir.reached(given, lambda node: node.users if ir.was_f32(node) else ()))


def _positions(node: fx.Node, low: torch.dtype) -> Wide:
    limit = int(2 / torch.finfo(low).eps)  # integers up to here are exact: 2048 in FP16
    bounds = () if ir.float_args(node) else node.args
    if any(not isinstance(a, (int, float)) or abs(a) > limit for a in bounds):
        return Wide("positions past the low dtype's last whole number", position=True, exact=True)
    return Wide("positions", position=True)


def _constant(value: torch.Tensor, low: torch.dtype) -> Wide | None:
    if value.numel() >= 1 << 20:
        return Wide("a constant too large to look through")
    numbers = value.detach().flatten().tolist()
    fits = _fits if len(numbers) == 1 else _in_range  # a table may hold numbers close to 1
    bad = next((x for x in numbers if not fits(x, low)), None)
    return None if bad is None else Wide(f"constant {bad:g}")


def _through(
    node: fx.Node, wide: dict[fx.Node, Wide], integers: Collection[fx.Node], *, read_by_digit: bool
) -> Wide | None:
    """Pin the node if a constant or a wide operand requires it. Returns why its result is wide."""
    decision, rule = ir.mark(node), ir.rule(node)
    operands = _operands(node, wide, integers)
    if decision.precision is Precision.KEEP:
        if any(rules.rule_named(name).makes_positions for name in ir.hidden_calls(node)):
            return Wide("whole numbers", position=True)
        copied = rule.copies_constant or rule is rules.UNKNOWN
        return operands[0] if operands and copied else None
    if decision.precision is Precision.FULL:
        hands_on = rule.averages or (rule.precision is Precision.FOLLOW and not rule.bounded)
        return operands[0] if operands and (hands_on or ir.is_getitem(node)) else None
    if decision.by is ir.By.POLICY:
        return None
    numbers = _scalars(node)
    bound = _lost_bound(numbers, decision.low)
    number = bound or _lost_number(numbers, decision.low, beside_one=rule.adds)
    if number is not None:
        reason = f"{ir.SHORT[decision.low]} can't hold the constant {number:g}"
        ir.remark(node, precision=Precision.FULL, by=ir.By.GUARD, reason=reason)
        if bound is not None:
            ir.pin_producers(node, f"{node.name} bounds it by {number:g}", products=False)
        return Wide(f"constant {number:g}")
    if decision.precision is Precision.LOW:
        operands = [w for w in operands if w.exact or (w.position and read_by_digit)]
    if not operands:
        return None
    first = next((w for w in operands if w.exact), operands[0])
    reason = f"an input is wide: {first.why}"
    ir.remark(node, precision=Precision.FULL, by=ir.By.GUARD, reason=reason)
    ends = rule.bounded or (decision.precision is Precision.LOW and not read_by_digit)
    return None if ends else first


def _operands(
    node: fx.Node, wide: dict[fx.Node, Wide], integers: Collection[fx.Node]
) -> list[Wide]:
    """What is wide among the values that would be rounded to the dtype the node computes in."""
    if ir.is_getitem(node):
        return [wide[n] for n in node.all_input_nodes if n in wide]
    found = [
        wide[n] for i, n in ir.float_args(node) if n in wide and rules.castable(node.target, i)
    ]
    if ir.rule(node).promotes:
        found += [_INTEGERS for n in node.all_input_nodes if n in integers]
    return found


def _lost_bound(numbers: list[float], low: torch.dtype) -> float | None:
    """A number that becomes 1 or -1 in `low`, or the same as another one."""
    bound = next((number for number in numbers if _on_edge(number, low)), None)
    meet = len({_rounded(number, low) for number in numbers}) < len(set(numbers))
    return numbers[-1] if bound is None and meet else bound


def _lost_number(numbers: list[float], low: torch.dtype, *, beside_one: bool) -> float | None:
    """A number that `low` can't hold, or that is nothing in it beside 1."""
    least = torch.finfo(low).eps / 2 if beside_one else 0.0
    return next((n for n in numbers if not _in_range(n, low) or 0 < abs(n) <= least), None)


def _scalars(node: fx.Node) -> list[float]:
    """The node's scalar operands that would be rounded to the dtype it computes in."""
    if not isinstance(node.target, OpOverload):
        return []
    if not all(rules.castable(node.target, i) for i in range(len(node.args))):
        return []  # batch_norm: its eps stays FP32 inside the kernel
    return ir.numbers(node)
