"""Remove casts that change nothing. Rewriting passes.

**`drop_noop_casts`** removes those that the FP32 capture turned into no-ops; it needs no marks.

User code says `scores.to(q.dtype)`; captured in FP32 that becomes `to(float32)` on an FP32 value.
If it stayed, it would be a real upcast once its input is FP16, and would end every FP16 chain.

    to: f32[4, 4] = to(scores, f32)            softmax(scores, -1)
    softmax: f32[4, 4] = softmax(to, -1)

An explicit `.float()` or `.to(torch.float32)` stays: the user asks for FP32, and classify pins it.
Casts that change dtype or device, or that must copy, stay too.

**`clean`** removes those that the rewrite left over; it is idempotent.

* A cast down of a value that was cast up from the same dtype becomes that value (exact).
* Casts that nothing reads are removed.

The other pair, a cast down and up again, is a rounding that the plan asked for: it stays.
"""

from __future__ import annotations

from torch import fx

from mpcompile import ir
from mpcompile.rules.policy import Config


def drop_noop_casts(gm: fx.GraphModule, config: Config) -> bool:
    changed = False
    for node in gm.graph.nodes:
        if ir.rule(node).converts and _is_noop(node) and not ir.is_float_call(node):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
            changed = True
    return changed


def _is_noop(node: fx.Node) -> bool:
    """Whether the call returned its input itself: same memory, dtype and strides."""
    old, new = ir.captured(node.args[0]), ir.captured(node)  # type: ignore[arg-type]
    if old is None or new is None or (old.dtype, old.device) != (new.dtype, new.device):
        return False
    return ir.storage(node.args[0]) == ir.storage(node)  # type: ignore[arg-type]


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
