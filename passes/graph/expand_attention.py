"""Write attention out as products where the device's low kernel is slow. A rewriting pass.

    out = attention(q, k, v, causal)    ->    scores = matmul(q, k^T)                       LOW
                                              softmax = softmax(scores * scale + mask)      FULL
                                              out = matmul(softmax, v)                      LOW

`mpcompile/planner/times.py` says where that pays.

The softmax is computed in FP32 from the FP32 scale and mask; a row with every position masked by
-inf or False is zero, as in the kernel. The pass runs after plan: only LOW attention is written
out, so a policy that asks for FP32 keeps the kernel, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import Mark, aten
from mpcompile.planner.times import is_written_out
from mpcompile.rules.policy import Config, Precision
from mpcompile.torch_inside.names import OpOverload


def expand_attention(gm: fx.GraphModule, config: Config) -> bool:
    found = [
        node
        for node in gm.graph.nodes
        if ir.precision(node) is Precision.LOW and is_written_out(node, config)
    ]
    for node in found:
        _expand(gm.graph, node)
    return bool(found)


def _expand(graph: fx.Graph, node: fx.Node) -> None:
    by, low = ir.By.REWRITE, ir.mark(node).low
    product = Mark(Precision.LOW, by, "attention written out: matrix product", low)
    between = Mark(Precision.FULL, by, "attention written out: softmax in FP32", low)
    query, key, value, mask, scale, dropout = (
        ir.argument(node, name)
        for name in ("query", "key", "value", "attn_mask", "scale", "dropout_p")
    )

    def call(name: str, mark: Mark, target: OpOverload, *args: Any) -> fx.Node:
        name = f"{node.name}_{name}"
        new = ir.insert(target, *args, name=name, like=node, decision=mark)
        new.meta["mp_captured"] = new.meta["val"]
        return new

    with graph.inserting_before(node):
        keys = call("keys", product, aten.transpose.int, key, -2, -1)
        scores = call("scores", product, aten.matmul.default, query, keys)
        scale = ir.shape(query)[-1] ** -0.5 if scale is None else scale
        scores = call("scaled", between, aten.mul.Tensor, scores, scale)
        never_empty = mask is None  # a causal row holds at least its first position
        if ir.argument(node, "is_causal"):
            shape = [ir.shape(query)[-2], ir.shape(key)[-2]]
            full = call("full", product, aten.new_full.default, query, shape, float("-inf"))
            mask = call("causal", product, aten.triu.default, full, 1)
        if mask is not None and ir.dtype(mask) is torch.bool:
            hidden = call("hidden", between, aten.logical_not.default, mask)
            scores = call("masked", between, aten.masked_fill.Scalar, scores, hidden, float("-inf"))
        elif mask is not None:
            scores = call("masked", between, aten.add.Tensor, scores, mask)
        softmax = aten.softmax.int if never_empty else aten._safe_softmax.default
        weights = call("softmax", between, softmax, scores, -1)
        if dropout:
            weights = call("dropout", between, aten.dropout.default, weights, dropout, True)
        out = call("out", product, aten.matmul.default, weights, value)
    ir.stands_for(out, node)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
