"""Remove casts that the rewrite left over. A rewriting pass; idempotent.

* A cast down of a value that was cast up from the same dtype becomes that value (exact).
* Casts that nothing reads are removed.

The other pair, a cast down and up again, is a rounding that the plan asked for: it stays.
"""

from __future__ import annotations

from torch import fx

from mpcompile import ir
from mpcompile.rules.policy import Config


def clean(gm: fx.GraphModule, config: Config) -> bool:
    changed = False
    for node in gm.graph.nodes:
        if not ir.is_cast(node) or not ir.is_cast(node.args[0]):
            continue
        through = node.args[0]
        before, between, now = (ir.dtype(n) for n in (through.args[0], through, node))
        if before is now and between.itemsize > now.itemsize:
            node.replace_all_uses_with(through.args[0])
            changed = True
    for node in reversed(gm.graph.nodes):
        if ir.is_cast(node) and not node.users:
            gm.graph.erase_node(node)
            changed = True
    return changed
