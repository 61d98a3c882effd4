"""Put other operators in the place of the program's, after its precisions are decided. Rewriting
passes.

**`narrow_softmax`** lets a softmax save its low result for the backward, not its FP32 one.

    softmax: f32 = softmax(x, -1)
    softmax_f16: f16 = to(softmax, f16)      ->      softmax_f16: f16 = softmax_low(x, -1, f16)
    out: f16 = matmul(softmax_f16, v)                out: f16 = matmul(softmax_f16, v)

The backward of a softmax needs its result, and torch uses the FP32 one: Inductor then saves the
scores as well, to recompute that result. Attention's scores are the largest values of a transformer
block. `softmax_low` (`mpcompile/operators/library.py`) computes in FP32 and rounds its result; its
backward computes in FP32 from the rounded result, which the next product saves in any case. This is
what a half-precision model does, but with the exponentials and their sums in FP32.

Only at O2, where results have the low dtype, and only where nothing reads the FP32 result.

**`expand_attention`** writes attention out as products where the device's low kernel is slow.

    out = attention(q, k, v, causal)    ->    scores = matmul(q, k^T)                       LOW
                                              softmax = softmax(scores * scale + mask)      FULL
                                              out = matmul(softmax, v)                      LOW

`mpcompile/planner/times.py` says where that pays.

The softmax is computed in FP32 from the FP32 scale and mask; a row with every position masked by
-inf or False is zero, as in the kernel. A mask that several heads share is made once, and kept for
all layers that read it. The pass runs after plan: only LOW attention is written
out, so a policy that asks for FP32 keeps the kernel, too.

**`fuse_head`** fuses a head and its loss, so that a large vocabulary's logits are not stored.

    linear: f32[B, T, V] = linear(x, w)             rows: f32[N, d] = reshape(x, [-1, d])
    view: f32[N, V] = view(linear, [-1, V])    ->   loss: f32[] = linear_cross_entropy(rows, w, ...)
    loss: f32[] = cross_entropy_loss(view, target)

The operator (`mpcompile/operators/fused_head.py`) reads x and the weight in the low dtype, makes
the logits for some rows at a time, computes in FP32, and makes the logits again in the backward: it
stores N numbers where the two operators store N*V and more, for one more matrix product. That pays
only where memory is short, so it is an option.

It fuses only where the result is the same: class indices for targets, classes last, logits that
nothing else reads, all under one grad mode and in one checkpoint. The pass runs after plan: the
linear is LOW, the loss FULL. The reason of a loss that is not fused says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mpcompile import ir
from mpcompile.ir import Mark, aten
from mpcompile.planner.times import is_written_out
from mpcompile.rules.policy import Config, Level, Precision
from mpcompile.torch_inside.graphs import schema
from mpcompile.torch_inside.names import OpOverload

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


_HEADS = 4
"""The fewest that read a mask which is kept."""


def expand_attention(gm: fx.GraphModule, config: Config) -> bool:
    found = [
        node
        for node in gm.graph.nodes
        if ir.precision(node) is Precision.LOW and is_written_out(node, config)
    ]
    shown: dict[Any, fx.Node] = {}
    for node in found:
        _expand(gm.graph, node, shown)
    return bool(found)


def _expand(graph: fx.Graph, node: fx.Node, shown: dict[Any, fx.Node]) -> None:
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

    def once(key: Any, make: Callable[[], fx.Node]) -> fx.Node:
        """A mask, of which Inductor would make each element again in each pass of each softmax."""
        if (place := (key, ir.regions(node))) not in shown:
            mask, kept = make(), torch.ops.mpcompile.kept.default
            is_small = _HEADS * ir.hint(ir.value(mask).numel()) <= ir.hint(ir.value(scores).numel())
            shown[place] = call("mask", between, kept, mask) if is_small else mask
        return shown[place]

    def causal() -> fx.Node:
        full = call("full", product, aten.new_full.default, query, shape, float("-inf"))
        return call("causal", product, aten.triu.default, full, 1)

    with graph.inserting_before(node):
        keys = call("keys", product, aten.transpose.int, key, -2, -1)
        scores = call("scores", product, aten.matmul.default, query, keys)
        scale = ir.shape(query)[-1] ** -0.5 if scale is None else scale
        scores = call("scaled", between, aten.mul.Tensor, scores, scale)
        never_empty = mask is None  # a causal row holds at least its first position
        if ir.argument(node, "is_causal"):
            shape = [ir.shape(query)[-2], ir.shape(key)[-2]]
            mask = once(tuple(shape), causal)
        if mask is not None and ir.dtype(mask) is torch.bool:
            # As numbers: a kernel that reads bools takes them apart, one by one.
            key = (mask, node if ir.is_mutable(mask) else None)  # what is written is another mask
            seen = once(key, lambda: call("seen", between, aten.to.dtype, mask, torch.float32))
            hidden = call("hidden", between, aten.eq.Scalar, seen, 0)
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


LOSS = aten.cross_entropy_loss.default
LINEAR = aten.linear.default
RETURNED = "the logits are a result, too"
"""The reason where a model of Hugging Face's returns them beside the loss."""


class _Apart(Exception):
    """The head and its loss must stay two operators; the argument is the reason."""


def fuse_head(gm: fx.GraphModule, config: Config) -> bool:
    if not config.fuse_head:
        return False
    changed = False
    for loss in gm.graph.find_nodes(op="call_function", target=LOSS):
        try:
            linear, between = _head(loss)
            _check_alone([linear, *between, loss])
            _check_precision(linear, loss)
            _check_arguments(linear, loss)
        except _Apart as why:
            reason, apart = ir.mark(loss).reason, f"not fused with its head: {why}"
            if apart not in reason:
                ir.remark(loss, reason=f"{reason}; {apart}")
            continue
        _fuse(gm.graph, loss, linear, between)
        changed = True
    return changed


def _head(loss: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The linear that makes the logits, and the nodes between it and the loss, last first."""
    node, between = ir.argument(loss, "self"), []
    if len(ir.shape(node)) != 2:
        raise _Apart("its logits are not rows of classes, (N, V)")
    while ir.rule(node).in_order or node.target is aten.to.dtype:
        between.append(node)
        node = node.all_input_nodes[0]
    if node.target is not LINEAR:
        raise _Apart(f"its logits come from {ir.op_name(node).removeprefix('aten::')}")
    classes = ir.shape(ir.argument(node, "weight"))[0]
    for step in between:
        last = ir.shape(step)[-1:]
        if not (isinstance(classes, int) and last == (classes,) and ir.was_f32(step)):
            raise _Apart(f"{step.name} moves the classes")
    return node, between


def _check_alone(nodes: list[fx.Node]) -> None:
    """Raise if anything else reads the logits, or if they can't be made where the loss is."""
    linear, loss = nodes[0], nodes[-1]
    for node in nodes[:-1]:
        if any(user.op == "output" for user in node.users):
            raise _Apart(RETURNED)
        if len(node.users) > 1:
            raise _Apart(f"something else reads {node.name}")
    if any(ir.regions(node) != ir.regions(loss) for node in nodes):
        raise _Apart("an activation checkpoint ends between them")
    if any(ir.grad_enabled(node) != ir.grad_enabled(loss) for node in nodes):
        raise _Apart("the grad mode changes between them")
    for operand in linear.all_input_nodes:
        if ir.is_mutable(operand):
            raise _Apart(f"{operand.name} is written in place")


def _check_precision(linear: fx.Node, loss: fx.Node) -> None:
    head, own = ir.mark(linear), ir.mark(loss)
    if head.precision is not Precision.LOW:
        raise _Apart(f"{linear.name} is {head.precision.value}, {head.reason}")
    by_user = own.by is ir.By.POLICY and own.precision is not Precision.FULL
    if by_user or own.precision is Precision.KEEP:
        raise _Apart(f"it is {own.precision.value}, {own.reason}")


def _check_arguments(linear: fx.Node, loss: fx.Node) -> None:
    target, class_weight, smoothing = (
        ir.argument(loss, name) for name in ("target", "weight", "label_smoothing")
    )
    indices = ir.captured(target)
    if indices is None or indices.dtype is not torch.int64 or indices.ndim != 1:
        raise _Apart("its targets are not int64 indices of classes")
    if class_weight is not None and ir.requires_grad(class_weight):
        raise _Apart("its class weights learn")
    if not isinstance(smoothing, (int, float)):
        raise _Apart("its label_smoothing is no constant")
    if len(ir.shape(ir.argument(linear, "weight"))) != 2:
        raise _Apart(f"the weight of {linear.name} is no matrix")


def _fuse(graph: fx.Graph, loss: fx.Node, linear: fx.Node, between: list[fx.Node]) -> None:
    x, weight, bias = (ir.argument(linear, name) for name in ("input", "weight", "bias"))
    settings = [ir.argument(loss, declared.name) for declared in schema(LOSS).arguments[1:]]
    reason = f"{linear.name} and its loss in one: logits in FP32, some rows at a time, never stored"
    decision = Mark(Precision.LOW, ir.By.REWRITE, reason, ir.mark(linear).low)

    def call(name: str, target: OpOverload, *args: Any) -> fx.Node:
        new = ir.insert(target, *args, name=name, like=loss, decision=decision)
        new.meta["mp_captured"] = new.meta["val"]
        return new

    with graph.inserting_before(loss):
        if len(ir.shape(x)) != 2:
            x = call(f"{linear.name}_rows", aten.reshape.default, x, [-1, ir.shape(weight)[1]])
        operator = torch.ops.mpcompile.linear_cross_entropy.default
        fused = call(f"{linear.name}_loss", operator, x, weight, bias, *settings)
    ir.stands_for(fused, loss)
    loss.replace_all_uses_with(fused)
    for node in (loss, *between, linear):
        graph.erase_node(node)
