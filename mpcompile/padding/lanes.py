"""Which operators keep lanes (padding), and what number the lanes then hold.

A value with lanes may stay padded if two things hold, which together make every result and every
gradient exact:

1. each lane holds one known, finite number, so that zero weights cancel it;
2. the gradient that reaches a lane is zero, and stays zero on its way back.

The second follows from the first. Lanes end in a product with zeros or in a slice, where their
gradient is zero; an elementwise operator multiplies that zero by its derivative. So an elementwise
operator keeps lanes if its value and its derivative at the lanes' number are finite; both are
computed to find out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from .. import ir
from ..ir import aten
from ..ir.shapes import Lanes, Path, Size
from ..rules.rule import DIMS
from ..torch_inside.names import autocast_off

DimLanes = Mapping[int, Lanes]  # dimension -> the lanes at its end


@dataclass(frozen=True)
class Kept:
    """How one dimension of a result keeps its lanes.

    Attributes:
        lanes: the lanes of the result.
        operands: path of each operand that must have such lanes -> the dimension they must be in.
    """

    lanes: Lanes
    operands: Mapping[Path, int]


def kept(node: fx.Node, held: Callable[[fx.Node], DimLanes]) -> dict[int, Kept]:
    """The dimensions of the node's result that can keep lanes, given those of its operands."""
    if not ir.is_op(node) or ir.is_opaque(node) or ir.is_mutable(node) or ir.tensor(node) is None:
        return {}
    rule = ir.rule(node)
    other_cast = rule.converts and node.target is not aten.to.dtype
    if rule.elementwise and not other_cast:
        found = _through_elementwise(node, held)
    elif rule.dims is not None:
        found = _through_view(node, held)
    else:
        return {}
    # Elements in the lanes of two dimensions must hold one number.
    contents = {kept.lanes.content for kept in found.values()}
    return found if len(contents) == 1 else {}


# -- elementwise ----------------------------------------------------------------------------------


def densifies(node: fx.Node) -> bool:
    """Whether the node makes a dense result from a strided operand, in the same dimension order."""
    return ir.is_cast(node) or (ir.rule(node).elementwise and not ir.rule(node).may_alias)


def _through_elementwise(node: fx.Node, held: Callable[[fx.Node], DimLanes]) -> dict[int, Kept]:
    operands = {p: n for p, n in ir.operands(node).items() if ir.tensor(n) is not None}
    if len(operands) != len(ir.operands(node)):
        return {}  # a size or a number that is computed at run time
    shape = ir.value(node).shape
    found = {}
    for dim in {len(shape) - ir.value(n).dim() + d for n in operands.values() for d in held(n)}:
        if (one := _through_dim(node, dim, operands, held)) is not None:
            found[dim] = one
    return found


def _through_dim(
    node: fx.Node, dim: int, operands: Mapping[Path, fx.Node], held: Callable[[fx.Node], DimLanes]
) -> Kept | None:
    shape = ir.value(node).shape
    contents: dict[Path, float | None] = {}
    wanted: dict[Path, int] = {}
    lanes: Lanes | None = None
    for path, operand in operands.items():
        value = ir.value(operand)
        own = dim - len(shape) + value.dim()
        if own < 0 or not ir.known_equal(value.shape[own], shape[dim]):
            contents[path] = None  # broadcast: its one element, of any value, is used in every lane
            continue
        wanted[path] = own
        if own in held(operand):
            lanes = held(operand)[own]
            contents[path] = lanes.content
        elif value.is_floating_point() and _is_small(value, shape):
            contents[path] = 0.0  # this node will read it padded with zeros
        else:
            return None
    content = _at_lanes(node, contents)
    if lanes is None or content is None:
        return None
    return Kept(Lanes(lanes.padded, content), wanted)


def _is_small(value: torch.Tensor, shape: torch.Size) -> bool:
    """Whether another dimension is broadcast: padding it is cheaper than cutting the result."""
    return value.dim() < len(shape) or any(
        ir.known_equal(own, 1) and not ir.known_equal(size, 1)
        for own, size in zip(value.shape, shape, strict=True)
    )


def _at_lanes(node: fx.Node, contents: Mapping[Path, float | None]) -> float | None:
    """The result of the operator on the numbers in its operands' lanes, or None if not usable."""
    rule = ir.rule(node)
    if rule.zero_absorbs and 0.0 in contents.values():
        return 0.0
    if None in contents.values() or rule.random:
        return None
    with torch.inference_mode(False):
        lanes = [torch.tensor(c, requires_grad=True) for c in contents.values()]
    by_node = dict(zip((ir.operands(node)[path] for path in contents), lanes, strict=True))

    def lane(argument: Any) -> Any:
        return by_node[argument] if isinstance(argument, fx.Node) else argument

    args, kwargs = map_aggregate((node.args, node.kwargs), lane)
    if rule.converts:
        args = (args[0], torch.float32)
    with torch.inference_mode(False), torch.enable_grad(), autocast_off():
        try:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
            slopes = _slopes(result, lanes)
        except RuntimeError:  # it takes no 0-d tensor (needs four dimensions, say)
            return None
    found, low = result.item(), ir.value(node).dtype
    largest = torch.finfo(low).max if low.is_floating_point else -1.0
    fits = all(abs(number) <= largest for number in (found, *(slope.item() for slope in slopes)))
    # A zero such as 0.3 - 0.3 is not exact if one of the two was rounded to FP16 before.
    sure = found != 0 or all(
        _survives(content, ir.dtype(ir.operands(node)[path])) for path, content in contents.items()
    )
    return found if fits and sure else None


def _slopes(result: torch.Tensor, lanes: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if not result.requires_grad:  # detached: it gets no gradient
        return ()
    return torch.autograd.grad(result, lanes, allow_unused=True, materialize_grads=True)


def _survives(content: float | None, dtype: torch.dtype) -> bool:
    return content is not None and torch.tensor(content).to(dtype).item() == content


# -- views ----------------------------------------------------------------------------------------


def _through_view(node: fx.Node, held: Callable[[fx.Node], DimLanes]) -> dict[int, Kept]:
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    places = _DIMS[ir.rule(node).dims](node)
    return {
        places[dim]: Kept(lanes, {(0,): dim})
        for dim, lanes in held(operand).items()
        if dim in places and lanes.content is not None
    }


def _shapes(node: fx.Node) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return ir.shape(operand), ir.shape(node)


def _reshaped(node: fx.Node) -> dict[int, int]:
    """The dimensions that a view neither merges nor splits: those with as many elements before
    them, and as many after them, in both shapes.

    Only dimensions whose new size is a number in the call: that number gets replaced.
    """
    before, after = _shapes(node)
    places: dict[int, int] = {}
    for i, size in enumerate(before):
        for j, new in enumerate(after):
            rest = math.prod(before[i + 1 :]), math.prod(after[j + 1 :])
            alone = ir.known_equal(size, new) and ir.known_equal(*rest)
            if alone and isinstance(size, int) and j not in places.values():
                places[i] = j
                break
    return places


def _permuted(node: fx.Node) -> dict[int, int]:
    before, _ = _shapes(node)
    rank = len(before)
    if ir.op_name(node) == "aten::t":
        order = list(range(rank))[::-1]
    elif ir.op_name(node) == "aten::permute":
        order = [d % rank for d in ir.argument(node, "dims")]
    else:
        first, second = (ir.argument(node, name) % rank for name in ("dim0", "dim1"))
        order = list(range(rank))
        order[first], order[second] = order[second], order[first]
    return {dim: place for place, dim in enumerate(order)}


def _unsqueezed(node: fx.Node) -> dict[int, int]:
    before, after = _shapes(node)
    new = ir.argument(node, "dim") % len(after)
    return {dim: dim + (dim >= new) for dim in range(len(before))}


# By the operator's `dims`: where each of its operand's dimensions goes that it keeps whole.
_DIMS: Mapping[str | None, Callable[[fx.Node], dict[int, int]]] = {
    "reshape": _reshaped,
    "permute": _permuted,
    "unsqueeze": _unsqueezed,
}
assert tuple(_DIMS) == DIMS
