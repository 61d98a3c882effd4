"""Read working copies in place of FP32 parameters. A rewriting pass, for O2 under an MPOptimizer.

    weight: f32 = input                              weight: f16 = input
    weight_f16: f16 = to(weight, f16)         ->     linear: f16 = linear(x, weight)
    linear: f16 = linear(x, weight_f16)

Only parameters that the optimizer's step keeps a copy of (`config.copied`), and of those the ones
that are read through casts to the low dtype and in no other way: the copy holds just what the cast
would give. A norm's weight, and a weight that something reads in FP32, stay as they are. The
gradient of a copy leaves the graph low, and times the loss scale: the step widens and unscales it.
"""

from __future__ import annotations

from torch import fx

from mpcompile import ir
from mpcompile.policy import Config


def read_copies(gm: fx.GraphModule, config: Config) -> bool:
    changed = False
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if i in config.copied and _only_cast(node, config):
            ir.set_dtype(node, config.low)
            ir.set_copy(node)
            for cast in list(node.users):
                cast.replace_all_uses_with(node)
                gm.graph.erase_node(cast)
            changed = True
    return changed


def _only_cast(node: fx.Node, config: Config) -> bool:
    return bool(node.users) and all(
        ir.is_cast(user) and ir.dtype(user) is config.low and not ir.regions(user)
        for user in node.users
    )
