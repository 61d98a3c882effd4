"""Keep for the backward what a norm has normalised, in half. A rewriting pass, on the joint graph.

    x: f32 = add(x_0, ...)                           the stream; read on in the forward, as it was
    sub: f32 = sub(x, mean)
    mul: f32 = mul(sub, rstd)                        mul: f32 = mul(sub, rstd)
                                                     kept: bf16 = convert(mul, bf16)
    y: bf16 = convert(mul * w + b, bf16)             y: bf16 = convert(mul * w + b, bf16)
    ...                                              ...
    sub_1: f32 = sub(x, mean)                        wide: f32 = convert(kept, f32)
    mul_1: f32 = mul(sub_1, rstd)
    grad: f32 = ... mul_1 ...                        grad: f32 = ... wide ...

A norm's backward reads its operand, and the partitioner keeps it: in FP32 where that is a sum of
FP32 (a residual stream), which is the largest of what O1, and autocast, keep in FP32. The forward
stays as it is. What the backward reads of `x` is made of the kept value again: `kept / rstd +
mean`, so that the error is one rounding of `x - mean`, however large the mean is. A normalised
value is at most the square root of the number of values that it was normalised among, so FP16 holds
it. The gradient that meets it there was rounded to the same dtype by the product that reads `y`.

Contract. The graph is ATen after autograd and Inductor's decompositions, before the partitioner,
which decides what is kept: either this, or what it can be computed from. The first `own_results`
results are the forward's. Left as they are:
* a norm whose result no product reads in half: who asked for FP32 has it in the backward, too;
* an operand that something else than a norm reads for its own backward, or that is there anyway:
  an input, a result, a widened half;
* what a checkpoint computes again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.dtypes import HALF
from mpcompile.torch_inside.inductor import CHECKPOINTED

_CONVERT = torch.ops.prims.convert_element_type.default
# Their backward reads no operand.
_LINEAR = (aten.add.Tensor, aten.sub.Tensor, aten.view.default, aten.permute.default, _CONVERT)


@dataclass(frozen=True)
class _Norm:
    """`result = (operand - mean) * rstd`; `centred` is what `rstd` multiplies."""

    operand: fx.Node
    mean: fx.Node | None
    centred: fx.Node
    rstd: fx.Node
    result: fx.Node
    inside: frozenset[fx.Node]
    low: torch.dtype


def keep_normalized(graph: fx.Graph, own_results: int) -> bool:
    """Rewrite what the backward reads of norms; see the module."""
    results: list[Any] = list(graph.output_node().args[0])[:own_results]  # type: ignore[arg-type]
    forward = ir.all_before(n for n in results if isinstance(n, fx.Node))
    norms = [norm for node in graph.nodes if node in forward for norm in _norms(node, forward)]
    inside = {node for norm in norms for node in norm.inside}
    changed = False
    for norm in norms:
        others = forward.difference(inside).intersection(norm.operand.users)
        if norm.operand not in results and all(node.target in _LINEAR for node in others):
            changed |= _keep(graph, norm, forward)
    return changed


def _norms(result: fx.Node, forward: set[fx.Node]) -> Iterator[_Norm]:
    """The norm that this node is the result of, if it may be kept low."""
    if result.target is not aten.mul.Tensor or len(result.all_input_nodes) != 2:
        return
    for centred, rstd in permutations(result.all_input_nodes):
        is_centred = centred.target is aten.sub.Tensor and not centred.kwargs
        parts: Any = centred.args if is_centred else (centred, None)
        operand, mean = parts
        is_norm = (
            rstd.target is aten.rsqrt.default
            and _spread_of(rstd.all_input_nodes[0]) in (operand, centred)
            and all(_is_statistic(n, operand) for n in (rstd, mean or rstd))
            and ir.dtype(result) is ir.dtype(operand) is torch.float32
        )
        low = _low(result, forward) if is_norm and not _is_there(operand) else None
        inside = ir.all_before([result], [operand])
        if low is not None and not any(CHECKPOINTED in node.meta for node in inside):
            yield _Norm(operand, mean, centred, rstd, result, frozenset(inside), low)


def _spread_of(node: fx.Node) -> fx.Node | None:
    """Whose variance, or mean of squares, this is, with or without a small number added."""
    if node.target in (aten.add.Tensor, aten.add.Scalar) and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    if ir.is_getitem(node) and node.args[1] == 0:
        node = node.all_input_nodes[0]
        return node.all_input_nodes[0] if node.target is aten.var_mean.correction else None
    if node.target is aten.var.correction:
        return node.all_input_nodes[0]
    square = node.all_input_nodes[0] if node.target is aten.mean.dim else None
    if square is None or square.target not in (aten.pow.Tensor_Scalar, aten.mul.Tensor):
        return None
    base, other = square.args
    return base if other in (2, base) else None  # type: ignore[return-value]


def _is_statistic(node: object, operand: object) -> bool:
    """Whether the value is one of many elements of the operand, and was left in its dimensions."""
    if not isinstance(node, fx.Node) or not isinstance(operand, fx.Node):
        return False
    small, large = ir.shape(node), ir.shape(operand)
    sizes = [a for a, b in zip(small, large, strict=False) if not ir.known_equal(a, b)]
    left = len(small) == len(large) and all(ir.known_equal(size, 1) for size in sizes)
    return left and bool(sizes)


def _low(result: fx.Node, forward: set[fx.Node]) -> torch.dtype | None:
    """The half that the norm's result is rounded to, scaled and shifted or not."""

    def further(node: fx.Node) -> Iterator[fx.Node]:
        for user in forward.intersection(node.users) if ir.dtype(node) is torch.float32 else ():
            large = [n for n in user.all_input_nodes if ir.same_shape(ir.shape(n), ir.shape(node))]
            if ir.is_pointwise(user) and large == [node]:
                yield user

    return next((t for n in ir.reached([result], further) if (t := ir.dtype(n)) in HALF), None)


def _is_there(operand: fx.Node) -> bool:
    """Whether the backward finds the operand in memory, or can widen it again."""
    while operand.target is _CONVERT or operand.target is aten.view.default:
        operand = operand.all_input_nodes[0]
        if ir.dtype(operand) in HALF:
            return True
    return operand.op == "placeholder"


def _keep(graph: fx.Graph, norm: _Norm, forward: set[fx.Node]) -> bool:
    """Let the backward read what is kept low."""

    def after(node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if user not in forward]

    if norm.centred is not norm.operand:  # what the backward computes again is the same
        for made in (norm.centred, norm.result):
            for again in {user for operand in made.all_input_nodes for user in after(operand)}:
                if (again.target, again.args) == (made.target, made.args):
                    again.replace_all_uses_with(made)
                    graph.erase_node(again)
    readers = {node: after(node) for node in (norm.result, norm.centred, norm.operand)}
    first = next((n for n in graph.nodes if any(n in users for users in readers.values())), None)
    if first is None:
        return False
    with graph.inserting_after(norm.result):
        kept = ir.new_call(graph, _CONVERT, norm.result, norm.low)
    with graph.inserting_before(first):
        values = {norm.result: ir.new_call(graph, _CONVERT, kept, torch.float32)}
        if readers[norm.centred] or readers[norm.operand]:
            wide = values[norm.result]
            values[norm.centred] = ir.new_call(graph, aten.div.Tensor, wide, norm.rstd)
        if norm.mean is not None and readers[norm.operand]:
            centred = values[norm.centred]
            values[norm.operand] = ir.new_call(graph, aten.add.Tensor, centred, norm.mean)
    for node, value in values.items():
        node.replace_all_uses_with(value, readers[node].__contains__)
    return True
