"""When attention becomes two products around a softmax, instead of the fused kernel.

On CPUs, torch's fused kernel runs its BF16 backward at a fraction of the speed of its FP32 one, and
with dropout there is no fused kernel at all, only products in FP32 (torch 2.13). Two batched
products around one softmax, which Inductor fuses, run at the speed of the BF16 units. The price is
a stored (..., T, S) matrix, so long sequences keep the kernel; and so does a graph that has no
backward.
"""

from __future__ import annotations

import torch
from torch import fx

from .. import ir
from ..devices.registry import capabilities
from ..ir import aten
from ..rules.policy import Config

ATTENTION = aten.scaled_dot_product_attention.default
LONGEST = 512  # tokens; beyond it the kernel is as fast, and the matrix large


def is_written_out(node: fx.Node, config: Config) -> bool:
    """Whether this attention, if LOW, becomes two products: whether that is possible and pays."""
    return node.target is ATTENTION and _can_expand(node) and _should_expand(node, config)


def _can_expand(node: fx.Node) -> bool:
    """Whether plain operators can express it: as many key and value heads as query heads, and
    plain numbers for the sizes that the scale and the causal mask depend on.
    """
    needed = [] if ir.argument(node, "scale") is not None else [_size(node, "query", -1)]
    if ir.argument(node, "is_causal"):
        needed += [_size(node, name, -2) for name in ("query", "key")]
    gqa = ir.argument(node, "enable_gqa")
    return not gqa and all(isinstance(size, int) for size in needed)


def _should_expand(node: fx.Node, config: Config) -> bool:
    if not capabilities(config.device).has_slow_attention(ir.mark(node).low):
        return False
    if ir.argument(node, "dropout_p"):
        return True
    if not torch.is_grad_enabled():  # as around the graph: a plan is made in its mode
        return False
    sizes = [_size(node, name, -2) for name in ("query", "key")]
    return all(isinstance(size, int) and size <= LONGEST for size in sizes)


def _size(node: fx.Node, name: str, dimension: int) -> int | torch.SymInt:
    value = ir.captured(ir.argument(node, name))
    assert value is not None
    return value.shape[dimension]
