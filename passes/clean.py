"""Remove what the rewrite left over. A rewriting pass; idempotent.

* a cast down of a value that was cast up from that same dtype: the value itself (exact);
* casts that nobody reads any more.

The other pair, down and up again, is a rounding the plan asked for: it stays.
"""

from __future__ import annotations

from torch import fx

from mpcompile import ir
from mpcompile.policy import Config


def clean(gm: fx.GraphModule, config: Config) -> bool:
    changed = False
    for node in gm.graph.nodes:
        if not ir.is_cast(node) or not ir.is_cast(node.args[0]):
            continue
        origin = node.args[0].args[0]
        dtypes = ir.tensor(origin).dtype, ir.tensor(node.args[0]).dtype, ir.tensor(node).dtype
        if dtypes[0] == dtypes[2] and dtypes[1].itemsize > dtypes[0].itemsize:
            node.replace_all_uses_with(origin)
            changed = True
    for node in reversed(gm.graph.nodes):
        if ir.is_cast(node) and not node.users:
            gm.graph.erase_node(node)
            changed = True
    return changed
