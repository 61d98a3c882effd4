"""Keep for the backward what a norm has normalised, in half. A rewriting pass, on the joint graph.

    sub: f32 = sub(x, mean)                          x: a residual stream, say
    mul: f32 = mul(sub, rstd)                        mul: f32 = mul(sub, rstd)
                                                     kept: bf16 = convert(mul, bf16)
    y: bf16 = convert(mul * w + b, bf16)             y: bf16 = convert(mul * w + b, bf16)
    ...                                              ...
    sub_1: f32 = sub(x, mean)                        wide: f32 = convert(kept, f32)
    mul_1: f32 = mul(sub_1, rstd)
    grad: f32 = ... mul_1 ...                        grad: f32 = ... wide ...

A norm's backward reads its operand, and the partitioner keeps it: in FP32 where that is a sum of
FP32, which is the largest of what O1, and autocast, keep in FP32. The forward stays as it is. What
the backward reads of the operand is made of the kept value: `kept / rstd + mean`, so that the error
is one rounding of `x - mean`, however large the mean is. A normalised value is at most the square
root of the number of values that it was normalised among, so FP16 holds it. The gradient that meets
it there was rounded to the same dtype by the product that reads `y`.

Contract. The graph is ATen after autograd and Inductor's decompositions, before the partitioner,
which decides what is kept: either this, or what it can be computed from. The first `own_results`
results are the forward's. Left as they are:
* a norm whose result no product reads in half: who asked for FP32 has it in the backward, too;
* a norm of which something else reads a value for its own backward, but to scale the result;
* an operand that is there anyway: an input, a result, a widened half;
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
_LINEAR = {aten.add.Tensor, aten.sub.Tensor, aten.view.default, aten.permute.default, _CONVERT}


@dataclass(frozen=True)
class _Norm:
    """`result = (operand - mean) * rstd`; `centred` is what `rstd` multiplies."""

    operand: fx.Node
    mean: fx.Node | None
    centred: fx.Node
    rstd: fx.Node
    result: fx.Node
    low: torch.dtype


def keep_normalized(graph: fx.Graph, own_results: int) -> bool:
    """Rewrite what the backward reads of norms; see the module."""
    results: list[Any] = list(graph.output_node().args[0])[:own_results]  # type: ignore[arg-type]
    forward = ir.all_before(n for n in results if isinstance(n, fx.Node))
    norms = [norm for node in graph.nodes if node in forward for norm in _norms(node, forward)]
    others = set(forward)
    for norm in norms:  # without its operand, which may read that of another
        others -= ir.all_before([norm.result], [norm.operand]) - {norm.operand}
    norms = [norm for norm in norms if norm.operand not in results and _is_free(norm, others)]
    return True in [_keep(graph, norm, forward) for norm in norms]


def _is_free(norm: _Norm, others: set[fx.Node]) -> bool:
    """Whether the backward of none of these reads a value of the norm, but to scale its result."""
    read = {*norm.operand.users, *norm.centred.users}
    read |= {node for node in norm.result.users if node.target is not aten.mul.Tensor}
    return all(node.target in _LINEAR for node in others & read)


def _norms(result: fx.Node, forward: set[fx.Node]) -> Iterator[_Norm]:
    """The norm that this node is the result of, if it may be kept low."""
    read = result.all_input_nodes if result.target is aten.mul.Tensor else []
    for centred, rstd in permutations(read) if len(read) == 2 else ():
        if not _normalizes(rstd, centred) or CHECKPOINTED in {*centred.meta, *result.meta}:
            continue
        is_difference = centred.target is aten.sub.Tensor and len(centred.all_input_nodes) == 2
        parts: Any = centred.args if is_difference and not centred.kwargs else (centred, None)
        operand, mean = parts
        wide = ir.dtype(operand) is torch.float32 and not _is_there(operand)
        low = _low(result, forward) if wide else None
        if low is not None and all(_is_statistic(n, operand) for n in (rstd, mean or rstd)):
            yield _Norm(operand, mean, centred, rstd, result, low)


def _normalizes(rstd: fx.Node, centred: fx.Node) -> bool:
    """Whether it is 1 over the root of the mean of the other's squares, or of the variance around
    the mean that the other was freed of; with or without a small number added.
    """
    if rstd.target is not aten.rsqrt.default:
        return False
    (node,) = rstd.all_input_nodes
    if node.target in (aten.add.Tensor, aten.add.Scalar) and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    of = node.all_input_nodes[0] if node.all_input_nodes else node
    if of.target is aten.var_mean.correction and node.args[1] == 0:
        freed = [(of.args[0], user) for user in of.users if user.args[1] == 1]
        return centred.target is aten.sub.Tensor and not centred.kwargs and centred.args in freed
    is_product = of.target in (aten.pow.Tensor_Scalar, aten.mul.Tensor)
    is_square = is_product and of.args in ((centred, 2), (centred, centred))
    return node.target is aten.mean.dim and is_square


def _is_statistic(node: fx.Node, operand: fx.Node) -> bool:
    """Whether the value is one of many elements of the operand, and was left in its dimensions."""
    small, large = ir.shape(node), ir.shape(operand)
    sizes = [a for a, b in zip(small, large, strict=False) if not ir.known_equal(a, b)]
    reduced = bool(sizes) and all(ir.known_equal(size, 1) for size in sizes)
    return reduced and len(small) == len(large)


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
    while operand.target in (_CONVERT, aten.view.default) and ir.dtype(operand) not in HALF:
        operand = operand.all_input_nodes[0]
    return operand.op == "placeholder" or ir.dtype(operand) in HALF


def _keep(graph: fx.Graph, norm: _Norm, forward: set[fx.Node]) -> bool:
    """Let the backward read what is kept low."""

    def readers(node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if user not in forward]

    for made in (norm.centred, norm.result) if norm.mean else ():  # computed again, it is the same
        for again in {user for operand in made.all_input_nodes for user in readers(operand)}:
            if (again.target, again.args) == (made.target, made.args):
                again.replace_all_uses_with(made)
                graph.erase_node(again)
    read = {node: readers(node) for node in (norm.result, norm.centred, norm.operand)}
    users = {user for some in read.values() for user in some}
    if not users:
        return False
    with graph.inserting_before(next(node for node in graph.nodes if node in users)):
        kept = ir.new_call(graph, _CONVERT, norm.result, norm.low)
        value = ir.new_call(graph, _CONVERT, kept, torch.float32)
        norm.result.replace_all_uses_with(value, read[norm.result].__contains__)
        if read[norm.centred] or read[norm.operand]:
            value = ir.new_call(graph, aten.div.Tensor, value, norm.rstd)
            norm.centred.replace_all_uses_with(value, read[norm.centred].__contains__)
        if norm.mean and read[norm.operand]:
            value = ir.new_call(graph, aten.add.Tensor, value, norm.mean)
            norm.operand.replace_all_uses_with(value, read[norm.operand].__contains__)
    return True
