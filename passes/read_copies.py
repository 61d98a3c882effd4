"""Read working copies in place of FP32 parameters. A rewriting pass, for O2 under an MPOptimizer.

    weight: f32 = input                              weight: f16 = input
    weight_f16: f16 = to(weight, f16)         ->     linear: f16 = linear(x, weight)
    linear: f16 = linear(x, weight_f16)

Only for parameters that the optimizer's step keeps a copy of (`config.copied`), and only in place
of their casts to the low dtype: the copy holds just what the cast gives. A norm's weight has no
such cast and stays as it is. A weight that something reads in FP32 as well (an embedding tied to
the head) stays too, and the copy is one more input.
"""

from __future__ import annotations

from torch import fx

from mpcompile import ir
from mpcompile.policy import Config


def read_copies(gm: fx.GraphModule, config: Config) -> bool:
    graph = gm.graph
    changed = False
    for i, node in enumerate(graph.find_nodes(op="placeholder")):
        casts = [user for user in node.users if _is_low_cast(user, config)]
        if i not in config.copied or not casts:
            continue
        changed = True
        if len(casts) == len(node.users):
            copy = node
            ir.set_dtype(copy, config.low)
        else:
            copy = ir.add_input(graph, f"{node.name}_copy", ir.value(casts[0]), like=node)
        ir.set_copy(copy, of=i)
        for cast in casts:
            cast.replace_all_uses_with(copy)
            graph.erase_node(cast)
    return changed


def _is_low_cast(node: fx.Node, config: Config) -> bool:
    return ir.is_cast(node) and ir.dtype(node) is config.low and not ir.regions(node)
