"""Remove casts that the FP32 capture turned into no-ops. A rewriting pass; needs no marks.

User code says `scores.to(q.dtype)`; captured in FP32 that becomes `to(float32)` on an FP32 value.
If it stayed, it would be a real upcast once its input is FP16, and would end every FP16 chain.

    to: f32[4, 4] = to(scores, f32)            softmax(scores, -1)
    softmax: f32[4, 4] = softmax(to, -1)

An explicit `.float()` stays: the user asks for FP32, and the call doesn't repeat the model's dtype;
classify pins it. Casts that change dtype or device, or that must copy, stay too.
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
    return (
        old is not None
        and new is not None
        and old.dtype == new.dtype
        and old.device == new.device
        and ir.storage(node.args[0]) == ir.storage(node)  # type: ignore[arg-type]
    )
