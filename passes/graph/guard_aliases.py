"""Keep views in the memory that they view where someone relies on it: the caller may write to one
result and read another in the same memory. A deciding pass; LOW and FOLLOW become FULL.

    linear: LOW = linear(x, w)                 linear: LOW = linear(x, w)
    view: FOLLOW = view(linear, -1)      ->    view: FULL = view(linear, -1)
    return linear, view                        return linear, view

If each were cast to FP32 for the caller, they would lie in two places. So all views on the way from
the memory to such a result are pinned, and the cast comes before them, where the memory is made. A
view of an input is such a result, too: its memory is the caller's.

A view made under no_grad is treated alike: if autograd tracks the viewed value, it tracks the view,
but it would not track a cast.

Views of an input that is stored low are pinned to that dtype instead, for the same reason.

So is what `as_strided` reads: it names places in memory, and a cast of a slice would close the gaps
between them.

The user's policy is never overruled. If its results then no longer share memory, the checks of
`mpcompile/ir/spec.py` find that, and the graph is left in FP32.
"""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from mpcompile import ir
from mpcompile.rules.policy import Config, Precision


def guard_aliases(gm: fx.GraphModule, config: Config) -> bool:
    sharing: dict[int, set[fx.Node]] = defaultdict(set)
    results = [n for n in gm.graph.output_node().all_input_nodes if ir.was_f32(n)]
    for node in (*results, *gm.graph.find_nodes(op="placeholder")):
        if (memory := ir.storage(node)) is not None:
            sharing[memory].add(node)
    for result in results:
        memory = ir.storage(result)
        if memory is not None and len(sharing[memory]) > 1:
            _pin(result, f"{result.name} is returned, and so is something else in its memory")
        elif not ir.grad_enabled(result) and ir.requires_grad(result):  # as only views are
            _pin(result, f"{result.name} is a view made under no_grad of what autograd tracks")
    for node in gm.graph.nodes:
        if ir.rule(node).by_strides:
            _pin(node, f"{node.name} reads it by its places in memory")
    return False


def _pin(view: fx.Node, reason: str) -> None:
    """Pin the view and those that lead from its memory to it."""
    stored_low = {ir.storage(n) for n in filter(ir.is_low_input, view.graph.nodes)}
    as_stored = Precision.LOW if ir.storage(view) in stored_low else Precision.FULL
    for node in filter(_shown, ir.reached([view], _shown)):
        decided = ir.precision(node)
        if decided in (Precision.LOW, Precision.FOLLOW) and ir.mark(node).by is not ir.By.POLICY:
            ir.remark(node, precision=as_stored, by=ir.By.ALIAS, reason=reason)


def _shown(node: fx.Node) -> list[fx.Node]:
    """The operands in whose memory it lies."""
    return [n for n in node.all_input_nodes if ir.shares_memory(n, node)]
