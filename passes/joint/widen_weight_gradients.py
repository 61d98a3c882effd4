"""Make GEMMs write weight gradients in FP32. A rewriting pass, on AOTAutograd's joint graph.

    mm: f16 = mm(grad_t, x)                          mm: f32 = mm(grad_t, x, f32)
    view: f16 = view(mm, ...)                 ->     view: f32 = view(mm, ...)
    grad: f32 = convert_element_type(view, f32)
    mul: f32 = mul(grad, 1 / scale)                  mul: f32 = mul(view, 1 / scale)

A GEMM sums up in FP32 and rounds once, at the end, to its output's dtype. A weight gradient is a
sum over the whole batch, so the longest sum of all is rounded, or overflows FP16, and the next
operator casts it up again (the backward of the cast of an FP32 parameter). cuBLAS can write the
sum in FP32.

Algorithm. Take every cast to FP32 of a gradient that leaves the graph: it is computed from a
tangent, and on its way out only views, sums, and a product with one number (the loss scale) read
it. Walk up from it through views and additions (a parameter used twice) that nothing else reads. If
the walk meets a GEMM or a sum (a bias gradient), compute it and all nodes of the walk in FP32;
other values that enter the walk are cast there. Every value is at least as near the exact one as
before.

Contract. The graph is ATen after autograd and Inductor's decompositions; placeholders of gradients
have "tangents" in their name, which the partitioner needs, too. Each node carries its FakeTensor,
which the pass keeps correct. FP16 and BF16 values are widened only where the device has `mm.dtype`
(CUDA). Gradients that stay in the graph keep their dtype: for them FP32 would cost bandwidth.
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import ir
from mpcompile.devices.registry import capabilities, is_supported
from mpcompile.ir import aten
from mpcompile.ir.dtypes import HALF

UPCAST = torch.ops.prims.convert_element_type.default
GEMMS = {aten.mm.default: aten.mm.dtype, aten.bmm.default: aten.bmm.dtype}
SUMS = (aten.sum.default, aten.sum.dim_IntList)
ADD = aten.add.Tensor
# slice: Inductor pads the operands of a GEMM and cuts the result.
# constant_pad_nd with negative amounts: the backward of padding a weight.
VIEWS = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.permute.default,
    aten.t.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.slice.Tensor, aten.constant_pad_nd.default,
    aten.clone.default,
)  # fmt: skip


def widen_weight_gradients(graph: fx.Graph) -> bool:
    changed = False
    for node in _leaving_gradients(graph):
        if _is_upcast(node):
            changed |= _widen(graph, node)
    return changed


def _leaving_gradients(graph: fx.Graph) -> list[fx.Node]:
    """The nodes computed from a tangent whose value leaves the graph as a gradient."""
    inputs = graph.find_nodes(op="placeholder")
    tangents = (node for node in inputs if "tangents" in str(node.target))
    backward = set(ir.reached(tangents, lambda node: node.users))
    leaving = ir.reached(
        graph.find_nodes(op="output"), lambda n: n.all_input_nodes if _hands_on(n) else ()
    )
    both = backward.intersection(leaving)
    return [node for node in graph.nodes if node in both]


def _hands_on(node: fx.Node) -> bool:
    """Whether a gradient operand makes the result one that leaves: a view, a sum, a multiple, the
    output.
    """
    if node.target in (aten.mul.Tensor, aten.div.Tensor):
        values = [ir.tensor(operand) for operand in node.all_input_nodes]
        return sum(value is None or value.dim() > 0 for value in values) <= 1
    return node.op == "output" or node.target in (*VIEWS, ADD)


def _is_upcast(node: fx.Node) -> bool:
    return (
        node.target is UPCAST
        and node.args[1] is torch.float32
        and isinstance(node.args[0], fx.Node)
        and _is_low(node.args[0])
    )


def _is_low(node: fx.Node) -> bool:
    value = ir.tensor(node)
    return (
        value is not None
        and value.dtype in HALF
        and is_supported(value.device)
        and capabilities(value.device).products_leave_in_fp32()
    )


def _widen(graph: fx.Graph, upcast: fx.Node) -> bool:
    walked: list[fx.Node] = []  # each node before its operands
    entries: list[tuple[fx.Node, fx.Node]] = []
    edges = [(upcast, upcast.all_input_nodes[0])]
    while edges:
        reader, node = edges.pop()
        if not _is_low(node):
            continue
        if len(node.users) > 1 or not _can_widen(node):
            entries.append((reader, node))
            continue
        walked.append(node)
        if node.target in (*VIEWS, ADD):
            edges += [(node, operand) for operand in node.all_input_nodes]
    if all(node.target in (*VIEWS, ADD) for node in walked):
        return False  # no GEMM or sum: it would only save roundings of additions
    for reader, node in entries:
        with graph.inserting_before(reader):
            wide = ir.new_call(graph, UPCAST, node, torch.float32)
        reader.replace_input_with(node, wide)
    for node in reversed(walked):
        if node.target in GEMMS:
            node.target = GEMMS[node.target]
            node.args = (*node.args, torch.float32)
        elif node.target in SUMS:
            node.kwargs = {**node.kwargs, "dtype": torch.float32}
        ir.refresh(node)
    upcast.replace_all_uses_with(upcast.all_input_nodes[0])
    graph.erase_node(upcast)
    return True


def _can_widen(node: fx.Node) -> bool:
    """Whether the node has an FP32 form with the same operands, or is a view or an addition."""
    if node.target in GEMMS:
        return all(_is_low(operand) for operand in node.all_input_nodes)
    if node.target in SUMS:
        return "dtype" not in node.kwargs and _is_low(node.all_input_nodes[0])
    return node.target in (*VIEWS, ADD)
