"""Keep out of the low dtype values that it can't hold. A deciding pass; LOW and FOLLOW become FULL.

Captured constants may fit FP32 but not FP16. If they were rounded, eager mode would raise, or a
fully masked row would become NaN, or a division by zero would appear:

    masked_fill(scores, mask, -3.4e38)     below -65504: -inf, and NaN for a fully masked row
    add(norm, 1e-8)                        below 2**-24: zero
    arange(4096)                           above 2048 FP16 has no odd numbers (BF16: above 256)

A value is *wide* if it may not survive the cast. Values become wide at such constants, at integers
turned into floats, at results that leave the range by nature (`exp`, `sum`), and at O2 at data that
enters the graph without a gradient (a mask, a table; its range is unknown). A FOLLOW node with a
wide operand is pinned FULL, and its result is wide, too, unless it is bounded. Operators that
compute in FP32 anyway end the chain.
A LOW node takes a wide operand as autocast would, unless it is *exact* (positions, integers): then
the spacing of numbers matters, not their range, and the node is pinned.

The user's policy is never overruled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from mpcompile import ir, rules
from mpcompile.rules.policy import Config, Level, Precision

_WIDE_INTEGERS = (torch.int64, torch.int32, torch.int16)


@dataclass(frozen=True)
class Wide:
    why: str
    exact: bool = False


def guard_constants(gm: fx.GraphModule, config: Config) -> bool:
    wide: dict[fx.Node, Wide] = {}
    for node in gm.graph.nodes:
        found = _origin(node, gm, config)
        if found is None and ir.is_marked(node):
            found = _through(node, wide, config)
        if found is not None and any(True for _ in ir.tensors_of(node.meta.get("mp_captured"))):
            wide[node] = found
    return False


def _fits(number: float, dtype: torch.dtype) -> bool:
    """Whether a constant keeps its meaning in `dtype`: zero, inf, nan, or a normal number."""
    info = torch.finfo(dtype)
    magnitude = abs(number)
    if magnitude == 0 or magnitude == float("inf") or number != number:
        return True
    return bool(info.smallest_normal <= magnitude <= info.max)


def _whole_numbers_up_to(dtype: torch.dtype) -> int:
    """Integers up to here are exact: 2048 in FP16, 256 in BF16."""
    return int(2 / torch.finfo(dtype).eps)


def _origin(node: fx.Node, gm: fx.GraphModule, config: Config) -> Wide | None:
    """Why the node's value is wide by itself, or None."""
    value = ir.captured(node)
    if node.op == "placeholder":
        if config.level is not Level.O2:
            return None  # O1 computes with FP32 inputs in FP32, O3 has no rules
        trained = ir.requires_grad(node) or ir.is_parameter(node)
        if value is not None and value.dtype is torch.float32 and not trained:
            return Wide("data of unknown range")
        return None
    if node.op == "get_attr":
        constant = ir.attribute(gm, node)
        if isinstance(constant, torch.Tensor) and constant.is_floating_point():
            return _constant(constant, config.low)
        return None
    if not ir.is_op(node):
        return None
    rule = ir.rule(node)
    if rule.fill is not None:
        number = ir.argument(node, rule.fill)
        if isinstance(number, (int, float)) and not _fits(number, config.low):
            return Wide(f"constant {number:g}")
    if rule.makes_positions and value is not None and value.is_floating_point():
        limit = _whole_numbers_up_to(config.low)
        bounds = [a for a in node.args if not isinstance(a, (int, float)) or abs(a) > limit]
        if bounds:
            return Wide("positions past the low dtype's last whole number", exact=True)
    if rule.converts and value is not None and value.is_floating_point():
        source = ir.captured(node.args[0])  # type: ignore[arg-type]
        if source is not None and source.dtype in _WIDE_INTEGERS:
            return Wide("integers that the low dtype can't tell apart", exact=True)
    if rule.grows:
        return Wide(f"{ir.op_name(node).removeprefix('aten::')} can leave the low dtype's range")
    return None


def _constant(value: torch.Tensor, low: torch.dtype) -> Wide | None:
    if value.numel() >= 1 << 20:
        return Wide("a constant too large to look through")
    numbers = value.detach().flatten().tolist()
    bad = next((x for x in numbers if not _fits(x, low)), None)
    return None if bad is None else Wide(f"constant {bad:g}")


def _through(node: fx.Node, wide: dict[fx.Node, Wide], config: Config) -> Wide | None:
    """Pin the node if a constant or a wide operand requires it. Returns why its result is wide."""
    decision = ir.mark(node)
    operands = [
        wide[n] for i, n in ir.float_args(node) if n in wide and rules.castable(node.target, i)
    ]
    if decision.precision is Precision.KEEP:
        return operands[0] if operands and ir.rule(node).copies_constant else None
    if decision.precision is Precision.FULL and ir.rule(node).averages:
        return operands[0] if operands else None  # its result is as large as its operand
    if decision.by is ir.By.POLICY or decision.precision is Precision.FULL:
        return None
    if (number := _bad_scalar(node, decision.low)) is not None:
        why = f"{ir.SHORT[decision.low]} can't hold the constant {number:g}"
        ir.remark(node, precision=Precision.FULL, by=ir.By.GUARD, reason=why)
        return Wide(f"constant {number:g}")
    if not operands:
        return None
    if decision.precision is Precision.LOW and not any(w.exact for w in operands):
        return None
    first = next((w for w in operands if w.exact), operands[0])
    ir.remark(
        node, precision=Precision.FULL, by=ir.By.GUARD, reason=f"an input is wide: {first.why}"
    )
    return None if ir.rule(node).bounded else first


def _bad_scalar(node: fx.Node, low: torch.dtype) -> float | None:
    """The first number among the node's scalar operands that `low` can't hold."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if not all(rules.castable(node.target, i) for i in range(len(node.args))):
        return None  # batch_norm: its eps stays FP32 inside the kernel
    schema = node.target._schema.arguments
    for i, argument in ir.positions(node):
        is_number = isinstance(argument, (int, float)) and not isinstance(argument, bool)
        is_scalar = is_number and 0 <= i < len(schema) and str(schema[i].type) in _SCALARS
        if is_scalar and not _fits(float(argument), low):
            return float(argument)
    return None


# The schema types of such operands; add(x, 1e-8) passes its number as a tensor.
_SCALARS = ("number", "Optional[number]", "Optional[float]", "Tensor")
