"""Read working copies in place of FP32 parameters. A rewriting pass, under an MPOptimizer.

    weight: f32 = input                              weight: f16 = input
    weight_f16: f16 = to(weight, f16)         ->     linear: f16 = linear(x, weight)
    linear: f16 = linear(x, weight_f16)

Only parameters of which the optimizer's step keeps a copy (`config.copied`) are replaced, and only
in their casts to the low dtype: the copy holds exactly the result of the cast. A norm's weight has
no such cast and stays. A weight that some node reads in FP32 as well stays too (that of an
embedding, tied to the head), and the copy is an additional input. Its gradient is the weight's:

    weight_f16: f16 = to(weight, f16)      ->      weight_f16: f16 = read_copy(weight, weight_copy)

So the compiled backward adds up both, and the optimizer gets one. Where it has no gradient, the
copy is read as it is. A weight that this graph writes is read as it is written.

A copy is stored in the shape that its cast is padded to, so the pad is removed with the cast:

    weight: f32[1001, 257] = input                      weight: f16[1008, 264] = input
    weight_f16: f16[1001, 257] = to(weight, f16)
    weight_padded: f16[1008, 264] = constant_pad_nd ->

A node that reads another shape of the copy (an embedding tied to a padded head, a graph compiled
later) gets it cut and padded as its cast was.
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.rules.policy import Config
from mpcompile.torch_inside.names import suggest_memory_format

_READ = ir.added(ir.Role.CAST, "the optimizer's copy, in place of a cast")


def read_copies(gm: fx.GraphModule, config: Config) -> bool:
    graph = gm.graph
    changed = False
    for i, node in enumerate(graph.find_nodes(op="placeholder")):
        casts = [user for user in node.users if _is_low_cast(user, config)]
        if i not in config.copied or ir.is_mutable(node):
            continue
        if casts and ir.copy_of(node) is None:
            _read(graph, node, i, casts, config)
            changed = True
    return changed


def _is_low_cast(node: fx.Node, config: Config) -> bool:
    return ir.is_cast(node) and ir.dtype(node) is config.low and not ir.regions(node)


def _read(
    graph: fx.Graph, node: fx.Node, number: int, casts: list[fx.Node], config: Config
) -> None:
    pads = [user for cast in casts for user in cast.users if _is_pad(user)]
    like = pads[0] if pads else casts[0]
    stored = config.copied[number]
    with ir.fake_mode(graph):
        value = torch.empty_like(ir.value(like))
        if stored is not None and stored != tuple(value.shape):
            order = suggest_memory_format(ir.value(node))
            value = value.new_empty(stored).contiguous(memory_format=order)
    real = ir.value(node)
    if len(casts) == len(node.users):
        copy = node
        ir.set_value(copy, value)
        ir.copy_of.set(copy, number)
    else:
        copy = given = ir.add_input(graph, f"{node.name}_copy", value, like=node)
        ir.copy_of.set(given, number)
        if torch.is_grad_enabled() and ir.requires_grad(node):
            with graph.inserting_before(ir.after(given)):
                operator, name = torch.ops.mpcompile.read_copy.default, f"{node.name}_read"
                copy = ir.insert(operator, node, given, name=name, like=node, decision=_READ)
    for pad in pads:
        if ir.same_shape(ir.value(pad).shape, value.shape):
            pad.replace_all_uses_with(copy)
            graph.erase_node(pad)
    if any(cast.users for cast in casts):
        with graph.inserting_before(ir.after(copy)):
            part = ir.cut_to(copy, real.shape, "the copy is stored padded")
        for cast in casts:
            cast.replace_all_uses_with(part)
    for cast in casts:
        graph.erase_node(cast)


def _is_pad(node: fx.Node) -> bool:
    return node.target is aten.constant_pad_nd.default and ir.role(node) is ir.Role.PAD
