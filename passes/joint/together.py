"""Do in few kernels what would be one for each tensor. Rewriting passes, on a graph as Inductor
lowers it. On a GPU a kernel that is shorter than its launch costs the launch.
Each value carries its FakeTensor.

**`cast_together`** casts the weights that products read in one kernel, in a forward.

    v16 = cast(v, f16)                           w16, v16 = cast_all([w, v], f16)
    a = mm(x, v16)                       ->      a = mm(x, v16)
    w16 = cast(w, f16)                           b = mm(a, w16)
    b = mm(a, w16)

No kernel of a library casts its operands. Cast so early, a low copy lives from the beginning of the
forward to its end. So only those are taken that the backward keeps anyway (in one graph with it:
that more than one product reads), and small ones such as biases.

Contract. A weight is an input, dense, of sizes that are numbers,
that the graph doesn't write before the cast. Its cast is read by library kernels alone, directly or
by views; a generated kernel would cast on the way. Nor is it the weight of a convolution over
images, which Inductor lays out again where it casts.

**`unscale_together`** unscales the gradients that leave a graph in few kernels, and looks for
overflows in them on the way, in a backward.

    w, b, c: f32 = mm(...), sum(...), cast(...)      w, b, c: f32 = mm(...), sum(...), cast(...)
    bad_w = cast(any(not(isfinite(w))))              rows = cat([any(not(isfinite(c)), -1), ...])
    bad_b, bad_c = ...                         ->    found = cast(any(rows))
    found = bad_w + bad_b + bad_c                    unscale_all([w, b], found, 1 / scale)
    return (w * (1 / scale), b * ..., found)         return (w, b, c * (1 / scale), found)

A sum over all elements of a gradient takes one such kernel, or two, and no kernel of a library can
multiply by the scale.

* What a library wrote, a sum, or a scatter lies in memory of its own: all of these are unscaled in
  place by one kernel for many tensors, which looks at them as well.
* Any other gradient is written by a kernel that Inductor generates, and unscaled there. A sum over
  its rows only goes along in that kernel. What the rows of all gradients found is one short vector.

Contract. A gradient whose check doesn't look as `unscale_grad`
makes it, that is read once unscaled, or of a size that is no number, stays as it is. `found` is
nonzero exactly if it was; it no longer is the number of gradients that overflowed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.dtypes import HALF
from mpcompile.torch_inside.names import HigherOrderOperator, OpOverload

CAST = torch.ops.prims.convert_element_type.default
_FEWEST = 2  # tensors that are worth it

# -- cast_together ---------------------------------------------------------------------------------

_PRODUCTS = {
    aten.mm.default, aten.mm.dtype, aten.bmm.default, aten.bmm.dtype, aten.addmm.default,
    aten.baddbmm.default,
}  # fmt: skip
_PLAIN_VIEWS = {aten.view.default, aten.reshape.default, aten.permute.default, aten.t.default}
_SMALL = 2**15  # elements of a cast that may live longer than it must


def cast_together(graph: fx.Graph) -> bool:
    """Rewrite the graph. Returns whether anything changed."""
    written: set[int | None] = set()  # memory
    of_dtype: dict[torch.dtype, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is CAST and _is_taken(node):
            weight = node.all_input_nodes[0]
            if weight.op == "placeholder" and ir.storage(weight) not in written:
                of_dtype.setdefault(ir.dtype(node), []).append(node)
        elif isinstance(node.target, HigherOrderOperator):  # a kernel of the user's may write
            written.update(map(ir.storage, node.all_input_nodes))
        else:
            written.update(map(ir.storage, ir.written(node)))
    several = {dtype: casts for dtype, casts in of_dtype.items() if len(casts) >= _FEWEST}
    first = next((n for n in graph.nodes if n.op != "placeholder"), None)
    for dtype, casts in several.items():
        with graph.inserting_before(first):
            weights = [cast.all_input_nodes[0] for cast in casts]
            made = ir.new_call(graph, torch.ops.mpcompile.cast_all.default, weights, dtype)
            for i, cast in enumerate(casts):
                one = graph.call_function(operator.getitem, (made, i))
                one.meta = dict(cast.meta)
                cast.replace_all_uses_with(one)
    for cast in (cast for casts in several.values() for cast in casts):
        graph.erase_node(cast)  # one of them is `first`
    return bool(several)


def _is_taken(cast: fx.Node) -> bool:
    """Whether it is a cast of a weight that may be made at the beginning, and gains by it."""
    weight, low = cast.all_input_nodes[0], ir.tensor(cast)
    if low is None or low.dtype not in HALF:
        return False
    readers = list(_readers(cast))
    kept = len(readers) > 1
    products = [(reader, node) for reader, node in readers if reader.op != "output"]
    return (
        bool(products)
        and (kept or low.numel() <= _SMALL)
        and all(_is_product(reader, node) for reader, node in products)
        and _lies_alike(ir.tensor(weight), low)
    )


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Who reads the node or a view of it, each with what it reads."""
    for user in node.users:
        if user.target in _PLAIN_VIEWS:
            yield from _readers(user)
        else:
            yield user, node


def _is_product(reader: fx.Node, operand: fx.Node) -> bool:
    """Whether a library's kernel reads the operand as it lies."""
    if reader.target is aten.convolution.default:  # Inductor adds a bias elsewhere
        return reader.args[1] is operand and all(n == 1 for n in ir.value(operand).shape[2:])
    return reader.target in _PRODUCTS


def _lies_alike(weight: torch.Tensor | None, low: torch.Tensor) -> bool:
    """Whether the cast of a dense tensor is laid out as it is."""
    return (
        weight is not None
        and weight.layout is torch.strided
        and weight.dtype is torch.float32
        and all(isinstance(n, int) for n in (*weight.shape, *weight.stride()))
        and weight.numel() > 0
        and torch.empty_like(weight).stride() == weight.stride() == low.stride()
    )


# -- unscale_together ------------------------------------------------------------------------------

# Each makes its result in memory of its own: no kernel that Inductor generates writes it together
# with what reads it.
_ALONE = {
    aten.mm.default, aten.mm.dtype, aten.bmm.default, aten.bmm.dtype, aten.addmm.default,
    aten.sum.default, aten.sum.dim_IntList, aten.convolution_backward.default,
}  # fmt: skip
# So do these, where they add to zeros.
_SCATTERS = {
    "aten::index_put", "aten::scatter_add", "aten::_unsafe_index_put", "aten::index_add",
    "aten::_unsafe_masked_index_put_accumulate",
}  # fmt: skip
_VIEWS = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.permute.default,
    aten.t.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.squeeze.default,
}  # fmt: skip
# At least so many rows, where the shape allows: they run side by side. A longer row Inductor cuts,
# in a kernel of its own.
_ROWS, _LONGEST = 64, 8192


def unscale_together(graph: fx.Graph) -> bool:
    """Rewrite the graph. Returns whether anything changed."""
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    counts = [r for r in results if isinstance(r, fx.Node) and _is_count(r)]
    for count in dict.fromkeys(counts):
        leaves = _summands(count)
        known = {leaf: g for leaf in leaves if (g := _Leaving.of(leaf)) is not None}
        if len(known) < _FEWEST or len({_scale(g.inverse) for g in known.values()}) > 1:
            continue
        rest = [leaf for leaf in leaves if leaf not in known]
        with graph.inserting_before(output):
            found, renamed = _together(graph, list(known.values()), rest)
        renamed[count] = found
        results = [renamed.get(r, r) if isinstance(r, fx.Node) else r for r in results]
        output.args = (tuple(results),)
        graph.eliminate_dead_code()
        return True
    return False


@dataclass(frozen=True)
class _Leaving:
    """A gradient that leaves the graph.

    Attributes:
        scaled: its node.
        unscaled: the same times `inverse`, which is a result of the graph.
        inverse: one over the loss scale.
        bad: for each of its elements whether it is inf or nan.
        is_read: whether something else reads the scaled one.
    """

    scaled: fx.Node
    unscaled: fx.Node
    inverse: fx.Node
    bad: fx.Node
    is_read: bool

    @classmethod
    def of(cls, leaf: fx.Node) -> _Leaving | None:
        """The gradient whose overflow is counted by this summand, if it is as `unscale_grad` makes
        it.
        """
        some = _operand(leaf, CAST)
        bad = _operand(some, aten.any.default)
        finite = _operand(bad, aten.logical_not.default)
        if bad is None or finite is None or finite.target is not aten.mul.Tensor:
            return None
        equal, unequal = finite.args
        scaled = _operand(equal, aten.eq.Tensor)
        size = _operand(unequal, aten.ne.Scalar)
        if size is None or scaled is None or equal.args[1] is not scaled:  # type: ignore[union-attr]
            return None
        if _operand(size, aten.abs.default) is not scaled or unequal.args[1] != math.inf:  # type: ignore[union-attr]
            return None
        others = [user for user in scaled.users if user not in (equal, size)]
        for unscaled in others:
            inverse = _inverse(unscaled, scaled)
            if inverse is not None and _is_plain(scaled, unscaled, ir.value(inverse).device):
                return cls(scaled, unscaled, inverse, bad, len(others) > 1)
        return None


def _operand(node: object, target: OpOverload) -> fx.Node | None:
    """The first operand of a call of `target`; None if the node is none."""
    if not isinstance(node, fx.Node) or node.target is not target:
        return None
    first = node.args[0]
    return first if isinstance(first, fx.Node) else None


def _inverse(unscaled: fx.Node, scaled: fx.Node) -> fx.Node | None:
    """One over the scale, if that is what `scaled` is multiplied by for a result of the graph."""
    if unscaled.target is not aten.mul.Tensor or {u.op for u in unscaled.users} != {"output"}:
        return None
    inverse = next((a for a in unscaled.all_input_nodes if a is not scaled), None)
    return inverse if inverse is not None and _scale(inverse) is not None else None


def _scale(inverse: fx.Node) -> fx.Node | None:
    return inverse.all_input_nodes[0] if inverse.target is aten.reciprocal.default else None


def _is_plain(scaled: fx.Node, unscaled: fx.Node, device: torch.device) -> bool:
    """Whether it is FP32 on the device of the scale, with elements, and sizes that are numbers."""
    before, after = ir.tensor(scaled), ir.tensor(unscaled)
    return (
        before is not None
        and after is not None
        and before.layout is torch.strided
        and all(isinstance(n, int) for n in (*before.shape, *before.stride()))
        and before.numel() > 0
        and before.dtype is after.dtype is torch.float32
        and before.device == after.device == device
    )


# -- the count -------------------------------------------------------------------------------------


def _is_count(node: fx.Node) -> bool:
    value = ir.tensor(node)
    return (
        value is not None
        and value.dim() == 0
        and node.target in (aten.add.Tensor, CAST)
        and {user.op for user in node.users} == {"output"}
    )


def _summands(count: fx.Node) -> list[fx.Node]:
    """What is added up to it; nothing if one of these is read for something else. A summand may
    come twice, where two gradients are the same.
    """
    nodes = list(ir.reached([count], lambda n: n.all_input_nodes if _adds_two(n) else ()))
    sums = {count, *filter(_adds_two, nodes)}
    own = all(user in sums for node in nodes if node is not count for user in node.users)
    return [node for node in nodes if not _adds_two(node)] if own else []


def _adds_two(node: fx.Node) -> bool:
    return (
        node.target is aten.add.Tensor
        and not node.kwargs
        and all(isinstance(a, fx.Node) and ir.value(a).dim() == 0 for a in node.args)
    )


# -- rewriting -------------------------------------------------------------------------------------


def _together(
    graph: fx.Graph, gradients: Sequence[_Leaving], rest: Sequence[fx.Node]
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """Unscale these gradients and look at them. Returns what is nonzero if one overflowed, or is
    counted by `rest`; and what each result of the graph has become.
    """
    inverse = gradients[0].inverse
    renamed: dict[fx.Node, fx.Node] = {}
    alone, rows, counts = [], [], list(rest)
    for gradient in gradients:
        if _is_alone(gradient):
            alone.append(gradient.scaled)
            renamed[gradient.unscaled] = gradient.scaled
        else:
            rows.append(_in_rows(graph, gradient.bad))
    if rows:
        bad = ir.new_call(graph, aten.cat.default, rows) if len(rows) > 1 else rows[0]
        some = ir.new_call(graph, aten.any.default, bad)
        counts.append(ir.new_call(graph, CAST, some, torch.float32))
    else:  # memory of its own, in any case
        zero = {"dtype": torch.float32, "device": ir.value(inverse).device}
        counts.append(ir.new_call(graph, aten.full.default, [], 0, **zero))
    found, *others = counts
    for other in others:
        found = ir.new_call(graph, aten.add.Tensor, found, other)
    if alone:  # it sets `found` and never clears it
        ir.new_call(graph, torch.ops.mpcompile.unscale_all.default, alone, found, inverse)
    return found, renamed


def _in_rows(graph: fx.Graph, bad: fx.Node) -> fx.Node:
    """For each row whether some element of it is bad, as a vector."""
    shape = ir.value(bad).shape
    kept = _dims_kept(shape)
    with graph.inserting_before(bad.next):  # Inductor fuses no nodes that stand far apart
        if kept < len(shape):
            bad = ir.new_call(graph, aten.any.dims, bad, list(range(kept, len(shape))))
        return ir.new_call(graph, aten.reshape.default, bad, [-1]) if kept != 1 else bad


def _dims_kept(shape: Sequence[int]) -> int:
    """How many dims make a number of rows that suffices, none of them too long."""
    rows = [math.prod(shape[:kept]) for kept in range(len(shape) + 1)]
    enough = [kept for kept, number in enumerate(rows) if number >= _ROWS]
    short = [kept for kept in enough if rows[-1] <= _LONGEST * rows[kept]]
    if rows[-1] > _LONGEST and short == [len(shape)]:
        short = []  # an answer for each element would be as much to write as the gradient
    return (short or enough or [len(shape)])[0]


def _is_alone(gradient: _Leaving) -> bool:
    """Whether it may be written in place: it lies, without gaps, in memory that one operator has
    made for it, and nothing else shows that memory or reads what was there.
    """
    made, further = gradient.scaled, list[fx.Node]()
    while made.target in _VIEWS:
        made = made.all_input_nodes[0]
        further.append(made)
    value, call = ir.value(gradient.scaled), made
    if made.target is operator.getitem:  # one of several results, each in memory of its own
        call = made.all_input_nodes[0]
    return (
        not gradient.is_read
        and all(len(node.users) == 1 for node in further)
        and (call.target in _ALONE or _adds_to_zeros(made))
        and ir.is_dense(value)
        and value.stride() == ir.value(gradient.unscaled).stride()
    )


def _adds_to_zeros(node: fx.Node) -> bool:
    if ir.op_name(node) not in _SCATTERS:
        return False
    zeros = node.args[0]
    return isinstance(zeros, fx.Node) and zeros.target is aten.full.default
