"""Let a softmax save its low result for the backward, not its FP32 one. A rewriting pass.

    softmax: f32 = softmax(x, -1)
    softmax_f16: f16 = to(softmax, f16)      ->      softmax_f16: f16 = softmax_low(x, -1, f16)
    out: f16 = matmul(softmax_f16, v)                out: f16 = matmul(softmax_f16, v)

The backward of a softmax needs its result, and torch uses the FP32 one: Inductor then saves the
scores as well, to recompute that result. Attention's scores are the largest values of a transformer
block. `softmax_low` (`mpcompile/operators/library.py`) computes in FP32 and rounds its result; its
backward computes in FP32 from the rounded result, which the next product saves in any case. This is
what a half-precision model does, but with the exponentials and their sums in FP32.

Only at O2, where results have the low dtype, and only where nothing reads the FP32 result.
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.rules.policy import Config, Level, Precision

_LOW_FORM = "mpcompile::softmax_low"


def narrow_softmax(gm: fx.GraphModule, config: Config) -> bool:
    changed = False
    for node in gm.graph.nodes if config.level is Level.O2 else ():
        if ir.rule(node).low_form == _LOW_FORM and _is_rounded(node):
            _narrow(gm.graph, node)
            changed = True
    return changed


def _is_rounded(node: fx.Node) -> bool:
    """Whether only a cast to the low dtype reads this softmax in FP32."""
    in_full = ir.precision(node) is Precision.FULL and ir.argument(node, "dtype") is None
    users = list(node.users)
    return (
        in_full
        and len(users) == 1
        and ir.is_cast(users[0])
        and ir.dtype(users[0]) is ir.mark(node).low
        and ir.regions(users[0]) == ir.regions(node)
    )


def _narrow(graph: fx.Graph, node: fx.Node) -> None:
    (cast,) = node.users
    safe = node.target is aten._safe_softmax.default
    softmax_low = torch.ops.mpcompile.softmax_low.default
    args = (node.args[0], ir.argument(node, "dim"), ir.dtype(cast), safe)
    reason = f"{ir.mark(node).reason}; its backward reads the low result"
    decision = ir.Mark(Precision.FULL, ir.By.REWRITE, reason, ir.mark(node).low)
    with graph.inserting_before(cast):
        new = ir.insert(softmax_low, *args, name=f"{node.name}_low", like=node, decision=decision)
    cast.replace_all_uses_with(new)
    graph.erase_node(cast)
    graph.erase_node(node)
