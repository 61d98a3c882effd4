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
from mpcompile.planner.times import ATTENTION, is_written_out
from mpcompile.rules.policy import Config, Precision
from mpcompile.torch_inside.graphs import schema
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


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument by its name in the schema, with defaults filled in."""
    declared = schema(ATTENTION).arguments
    defaults = {a.name: a.default_value for a in declared if a.has_default_value()}
    names = [argument.name for argument in declared]
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def _size(node: fx.Node, dimension: int) -> int | torch.SymInt:
    value = ir.captured(node)
    assert value is not None
    return value.shape[dimension]


def _expand(graph: fx.Graph, node: fx.Node) -> None:
    by, low = ir.By.REWRITE, ir.mark(node).format
    product = Mark(Precision.LOW, by, "attention written out: matrix product", low)
    between = Mark(Precision.FULL, by, "attention written out: softmax in FP32", low)
    arguments = _arguments(node)
    query, key, value, mask = (arguments[n] for n in ("query", "key", "value", "attn_mask"))

    def call(name: str, mark: Mark, target: OpOverload, *args: Any) -> fx.Node:
        name = f"{node.name}_{name}"
        new = ir.insert(target, *args, name=name, like=node, decision=mark)
        new.meta["mp_captured"] = new.meta["val"]
        return new

    with graph.inserting_before(node):
        keys = call("keys", product, aten.transpose.int, key, -2, -1)
        scores = call("scores", product, aten.matmul.default, query, keys)
        scale = arguments["scale"]
        scale = _size(query, -1) ** -0.5 if scale is None else scale
        scores = call("scaled", between, aten.mul.Tensor, scores, scale)
        never_empty = mask is None  # a causal row holds at least its first position
        if arguments["is_causal"]:
            shape = [_size(query, -2), _size(key, -2)]
            full = call("full", product, aten.new_full.default, query, shape, float("-inf"))
            mask = call("causal", product, aten.triu.default, full, 1)
        if mask is not None and _dtype(mask) is torch.bool:
            hidden = call("hidden", between, aten.logical_not.default, mask)
            scores = call("masked", between, aten.masked_fill.Scalar, scores, hidden, float("-inf"))
        elif mask is not None:
            scores = call("masked", between, aten.add.Tensor, scores, mask)
        softmax = aten.softmax.int if never_empty else aten._safe_softmax.default
        weights = call("softmax", between, softmax, scores, -1)
        if dropout := arguments["dropout_p"]:
            weights = call("dropout", between, aten.dropout.default, weights, dropout, True)
        out = call("out", product, aten.matmul.default, weights, value)
    for entry in ("mp_captured", "tensor_meta"):
        out.meta[entry] = node.meta.get(entry)
    node.replace_all_uses_with(out)
    graph.erase_node(node)


def _dtype(node: fx.Node) -> torch.dtype:
    value = ir.captured(node)
    assert value is not None
    return value.dtype
