"""How lanes travel: which operators keep them, and what the lanes hold afterwards.

A value with lanes may stay padded as long as two things hold, which together make every result and
every gradient exact:

1. each lane holds one known, finite number, so that zero weights cancel it;
2. the gradient that comes back into a lane is zero, and stays zero on its way up.

The second follows from the first: where lanes end, in a product with zeros or in a slice, their
gradient is zero, and an elementwise operator hands down zero times its derivative there. So an
elementwise operator keeps lanes if its value and its derivative at the lanes' number are finite,
which is found out by computing both.
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

Held = Mapping[int, Lanes]  # dimension -> the lanes at its end


@dataclass(frozen=True)
class Kept:
    """How one dimension of a result keeps its lanes.

    Attributes:
        lanes: of the result.
        operands: which dimension of which operands must carry such lanes for it.
    """

    lanes: Lanes
    operands: Mapping[Path, int]


def kept(node: fx.Node, held: Callable[[fx.Node], Held]) -> dict[int, Kept]:
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
    # Where lanes of two dimensions cross, they must agree.
    contents = {kept.lanes.content for kept in found.values()}
    return found if len(contents) == 1 else {}


# -- elementwise ----------------------------------------------------------------------------------


def densifies(node: fx.Node) -> bool:
    """Whether the node makes a dense result of a strided operand, laid out in the same order."""
    return ir.is_cast(node) or (ir.rule(node).elementwise and not ir.rule(node).may_alias)


def _through_elementwise(node: fx.Node, held: Callable[[fx.Node], Held]) -> dict[int, Kept]:
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
    node: fx.Node,
    dim: int,
    operands: Mapping[Path, fx.Node],
    held: Callable[[fx.Node], Held],
) -> Kept | None:
    shape = ir.value(node).shape
    contents: dict[Path, float | None] = {}
    wanted: dict[Path, int] = {}
    lanes: Lanes | None = None
    for path, operand in operands.items():
        value = ir.value(operand)
        own = dim - len(shape) + value.dim()
        if own < 0 or not ir.known_equal(value.shape[own], shape[dim]):
            contents[path] = None  # broadcast: its one element meets every lane
            continue
        wanted[path] = own
        if own in held(operand):
            lanes = held(operand)[own]
            contents[path] = lanes.content
        elif value.is_floating_point() and _is_small(value, shape):
            contents[path] = 0.0  # padded with zeros on the spot
        else:
            return None
    content = _at_lanes(node, contents)
    if lanes is None or content is None:
        return None
    return Kept(Lanes(lanes.real, lanes.padded, content), wanted)


def _is_small(value: torch.Tensor, shape: torch.Size) -> bool:
    """Whether it is broadcast along some other dimension: cheaper to pad than its result to cut."""
    return value.dim() < len(shape) or any(
        ir.known_equal(own, 1) and not ir.known_equal(size, 1)
        for own, size in zip(value.shape, shape, strict=True)
    )


def _at_lanes(node: fx.Node, contents: Mapping[Path, float | None]) -> float | None:
    """The number that the operator makes of the numbers in its operands' lanes, or None."""
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
    with torch.inference_mode(False), torch.enable_grad(), torch._C._DisableAutocast():
        try:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
            slopes = _slopes(result, lanes)
        except RuntimeError:  # it takes no single number: a layout of four dimensions, say
            return None
    found, low = result.item(), ir.value(node).dtype
    largest = torch.finfo(low).max if low.is_floating_point else -1.0
    fits = all(abs(number) <= largest for number in (found, *(slope.item() for slope in slopes)))
    # 0.3 - 0.3 is no zero where one of them was stored in FP16 on the way.
    sure = found != 0 or all(
        _survives(content, ir.dtype(ir.operands(node)[path])) for path, content in contents.items()
    )
    return found if fits and sure else None


def _slopes(result: torch.Tensor, lanes: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if not result.requires_grad:  # detached: no gradient ever comes back
        return ()
    return torch.autograd.grad(result, lanes, allow_unused=True, materialize_grads=True)


def _survives(content: float | None, dtype: torch.dtype) -> bool:
    return content is not None and torch.tensor(content).to(dtype).item() == content


# -- views ----------------------------------------------------------------------------------------


def _through_view(node: fx.Node, held: Callable[[fx.Node], Held]) -> dict[int, Kept]:
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
    """Dimensions that a view neither folds nor splits: as much before them, as much behind them.

    Only where the new size stands in the call as a number: that number is replaced.
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


# What an operator does with its operand's dimensions: where each one goes that it keeps whole.
_DIMS: Mapping[str | None, Callable[[fx.Node], dict[int, int]]] = {
    "reshape": _reshaped,
    "permute": _permuted,
    "unsqueeze": _unsqueezed,
}
