"""Give every computing node its precision class and the reason for it. A deciding pass.

The first rule that applies wins:

1. the node can't change: opaque calls, dtypes other than FP32, memory written in place,
   values that parameters are updated from                                             -> KEEP
2. an operator that `repair=True` has pinned                                           -> FULL
   the user's policy by node, by module, by operator                                   -> as asked
3. an autocast region of the user's own: disabled -> KEEP; another dtype -> that dtype
4. the table (rules/table.py); an operator in no row                                   -> KEEP
5. a gradient that the program takes inside of itself, in FP16                         -> FULL
6. no low-precision kernel on this device                                              -> FULL
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import ir, rules
from mpcompile.ir import By, Mark
from mpcompile.ir.parameter_updates import nodes_of_updates
from mpcompile.rules.policy import LOW_DTYPES, Config, Precision
from mpcompile.torch_inside.graphs import schema
from mpcompile.torch_inside.names import OpOverload

_INNER = "a gradient inside of the program: no loss scale keeps it in FP16's range"


def classify(gm: fx.GraphModule, config: Config) -> bool:
    _find_mutable(gm.graph)
    updates, why = nodes_of_updates(gm.graph), "a parameter or its gradient is written from it"
    update = Mark(Precision.KEEP, By.UPDATE, why, config.low)
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method"):
            ir.set_mark(node, update if node in updates else _decide(node, config))
        elif (stored := ir.stored(node)) is not None:
            reason = f"it is stored in {ir.SHORT[stored.dtype]}"
            ir.set_mark(node, Mark(Precision.LOW, By.CAPTURED, reason, config.low))
    return False


def _decide(node: fx.Node, config: Config) -> Mark:
    if (reason := _hands_off(node)) is not None:
        return Mark(Precision.KEEP, By.CAPTURED, reason, config.low)
    if (asked := _policy(node, config)) is not None:
        return asked
    low = config.low
    if (region := ir.autocast_region(node)) is not None:
        enabled, dtype = region
        if not enabled:
            return Mark(Precision.KEEP, By.REGION, "autocast is disabled here", low)
        if dtype is not None and dtype not in LOW_DTYPES.values():
            return Mark(Precision.KEEP, By.REGION, f"inside autocast({dtype})", low)
        low = dtype or config.low
    if ir.is_getitem(node):
        return Mark(Precision.FOLLOW, By.TABLE, "part of a result", low)
    rule = ir.rule(node)
    computes_low = rule.precision in (Precision.LOW, Precision.FOLLOW)
    computes_low &= rule.kind is not rules.Kind.VIEW
    if computes_low and ir.is_inner_gradient(node) and low is torch.float16:
        return Mark(Precision.FULL, By.GUARD, _INNER, low)
    if computes_low and not config.has_kernel(node):
        reason = f"no {ir.SHORT[low]} kernel on {config.device.type}"
        return Mark(Precision.FULL, By.KERNEL, reason, low)
    return Mark(rule.precision, By.TABLE, rule.reason, low)


def _hands_off(node: fx.Node) -> str | None:
    """Why the node must keep its dtypes even if the user asks otherwise, or None."""
    if ir.is_opaque(node):
        count = ir.hidden_products(node)
        stay = f"; {count} matrix product{'s stay' if count > 1 else ' stays'} FP32 there"
        return f"opaque: its body was captured in these dtypes{stay if count else ''}"
    if not (ir.is_op(node) or ir.is_getitem(node)):
        return "no tensor operator"
    if ir.is_mutable(node):
        return "its memory is written in place"
    touched = list(ir.tensors_of(node.meta["mp_captured"]))
    touched += [t for n in node.all_input_nodes for t in ir.tensors_of(n.meta["mp_captured"])]
    dtypes = {t.dtype for t in touched if ir.is_floating(t.dtype)}
    if not dtypes:
        return "no floating-point value"
    if dtypes != {torch.float32}:
        others = sorted(ir.SHORT.get(d, str(d)) for d in dtypes - {torch.float32})
        return f"touches {', '.join(others)}"
    if isinstance(node.target, OpOverload) and schema(node.target).is_mutable:
        return "writes in place"
    if ir.is_getitem(node) and ir.is_marked(node.args[0]):  # type: ignore[arg-type]
        parent = ir.mark(node.args[0])  # type: ignore[arg-type]
        if parent.precision is Precision.KEEP:
            return parent.reason
    return None


def _policy(node: fx.Node, config: Config) -> Mark | None:
    policy = config.policy
    if (reason := config.repaired.get(node.name)) is not None:
        return Mark(Precision.FULL, By.POLICY, reason, config.low)
    if node.name in policy.nodes:
        low = policy.low_dtypes.get(("nodes", node.name), config.low)
        reason = policy.reasons.get(node.name, f"node {node.name!r}")
        return Mark(policy.nodes[node.name], By.POLICY, f"policy: {reason}", low)
    if (hit := policy.for_module(ir.module_path(node))) is not None:
        pattern, word = hit
        low = policy.low_dtypes.get(("modules", pattern), config.low)
        return Mark(word, By.POLICY, f"policy: module {pattern!r}", low)
    if (word_for_op := policy.for_op(ir.op_name(node))) is not None:
        reason = f"policy: operator {ir.op_name(node)!r}"
        return Mark(word_for_op, By.POLICY, reason, config.low)
    return None


def _find_mutable(graph: fx.Graph) -> None:
    """Note each value whose memory some node writes, and all its aliases."""
    targets = [target for node in graph.nodes for target in ir.written(node)]
    memory = {place for target in targets if (place := ir.storage(target)) is not None}
    for node in reversed(graph.nodes):
        if ir.is_opaque(node):  # its results may be its operands
            results = (node, *filter(ir.is_getitem, node.users))
            if any(ir.storage(result) in memory for result in results):
                places = map(ir.storage, node.all_input_nodes)
                memory.update(place for place in places if place is not None)
    for node in graph.nodes:
        if ir.storage(node) in memory:
            ir.is_mutable.set(node, True)
    for target in targets:
        ir.is_mutable.set(target, True)
