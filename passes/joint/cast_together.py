"""Cast the weights that products read in one kernel. A rewriting pass, on a forward as Inductor
lowers it.

    v16 = cast(v, f16)                           w16, v16 = cast_all([w, v], f16)
    a = mm(x, v16)                       ->      a = mm(x, v16)
    w16 = cast(w, f16)                           b = mm(a, w16)
    b = mm(a, w16)

On a GPU a kernel that is shorter than its launch costs the launch, and no kernel of a library casts
its operands. Cast so early, a low copy lives from the beginning of the forward to its end. So only
those are taken that the backward keeps anyway (in one graph with it: that more than one product
reads), and small ones such as biases.

Contract. Each value carries its FakeTensor. A weight is an input, dense, of sizes that are numbers,
that the graph doesn't write before the cast. Its cast is read by library kernels alone, directly or
by views; a generated kernel would cast on the way. Nor is it the weight of a convolution over
images, which Inductor lays out again where it casts.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.dtypes import HALF
from mpcompile.torch_inside.names import HigherOrderOperator

CAST = torch.ops.prims.convert_element_type.default
_PRODUCTS = {
    aten.mm.default, aten.mm.dtype, aten.bmm.default, aten.bmm.dtype, aten.addmm.default,
    aten.baddbmm.default,
}  # fmt: skip
_VIEWS = {aten.view.default, aten.reshape.default, aten.permute.default, aten.t.default}
_FEWEST = 2  # casts that are worth it
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
        if user.target in _VIEWS:
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
