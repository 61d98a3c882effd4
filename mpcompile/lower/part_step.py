"""A whole step's graph, parted into forward and backward by torch's partitioner, and joined again:
a rewriting pass, on a graph that Inductor takes for an inference's.

    gelu = gelu(mm)                                  gelu = gelu(mm)
    mm_1 = mm(gelu, w)                               mm_1 = mm(gelu, w)
    ...                                              ...
    one = begin_backward(loss)                       one = full([], 1)
    ...                                              ...
                                                     again = gelu(mm)
    grad = mm(gelu.t(), tangent)                     grad = mm(again.t(), tangent)

All that the backward reads would lie in memory from the forward on. Parted as pieces are, and by
the same passes, the step keeps what they keep, and its backward computes the rest again.

Contract. The graph is ATen after Inductor's decompositions, functional but for writes to inputs at
its end. What depends on `begin_backward` is the backward, and what the program does after it. Not
parted are graphs
* of several backwards: the forward of one may come after the backward of another;
* of random operators other than dropout's: torch's partitioner may take two that look alike for
  one;
* of higher-order operators, which may write.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .. import ir
from ..ir import aten
from ..torch_inside.names import CustomPartitionerFn, HigherOrderOperator

_COPY = aten.copy_.default
_OF_DROPOUT = ("aten::bernoulli", "prims::inductor_seed", "prims::inductor_seeds")


class PartStep:
    """The pass, by this partitioner."""

    def __init__(self, partition: CustomPartitionerFn) -> None:
        self.partition = partition

    def __call__(self, graph: fx.Graph) -> bool:
        """Rewrite the graph; see the module. Returns whether it changed anything."""
        target = torch.ops.mpcompile.begin_backward.default
        begins = graph.find_nodes(op="call_function", target=target)
        if len(begins) == 1 and not any(map(_is_opaque, graph.nodes)):
            self._part(graph, begins[0])
        for begin in graph.find_nodes(op="call_function", target=target):
            ones = ir.value(begin)
            begin.target, begin.args = aten.full.default, ([*ones.shape], 1)
            begin.kwargs = {"dtype": ones.dtype, "device": ones.device}
        return bool(begins)

    def _part(self, graph: fx.Graph, begin: fx.Node) -> None:
        """Put what the partitioner makes of the graph in the place of its calls."""
        inputs = graph.find_nodes(op="placeholder")
        ends = [*graph.find_nodes(op="call_function", target=_COPY), graph.output_node()]
        around = {*inputs, *ends}
        calls = [n for n in graph.nodes if n not in around]
        of_backward = set(ir.reached([begin], lambda n: n.users))
        read = dict.fromkeys(n for end in ends for n in end.all_input_nodes if n not in around)
        # The loss, so that there is a forward.
        forwards = [n for n in {begin.all_input_nodes[0]: None, **read} if n not in of_backward]
        results = [*forwards, *(n for n in read if n in of_backward)]

        joint, new = ir.cut((n for n in calls if n is not begin), [*inputs, begin])
        new[begin].name = new[begin].target = "tangents_1"  # the partitioner looks for this word
        joint.output(tuple(new[n] for n in results))
        parts = self.partition(
            fx.GraphModule(graph.owning_module or {}, joint), (),
            num_fwd_outputs=len(forwards),
            static_lifetime_input_indices=list(range(len(inputs))),
        )  # fmt: skip
        with graph.inserting_before(ends[0]):
            known = {n.name: n for n in inputs}
            made = _copied(graph, parts[0], known)[: len(forwards)]
            known["tangents_1"] = graph.node_copy(begin, lambda _: made[0])
            made += _copied(graph, parts[1], known)
        for node, now in zip(results, made, strict=True):
            node.replace_all_uses_with(now)
        for node in reversed(calls):
            graph.erase_node(node)


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_opaque(node: fx.Node) -> bool:
    if isinstance(node.target, HigherOrderOperator):
        return True
    return _is_random(node) and ir.op_name(node) not in _OF_DROPOUT


def _copied(graph: fx.Graph, part: fx.GraphModule, known: dict[str, fx.Node]) -> list[fx.Node]:
    """Copy a half to the graph's insertion point. Its inputs are `known` by their names, and so
    are its nodes from then on. Returns its results.
    """
    new: dict[fx.Node, fx.Node] = {}
    for node in [*part.graph.nodes][:-1]:
        if node.op == "placeholder":
            new[node] = known[node.name]
        elif node.users or not _is_random(node):  # the partitioner leaves some in both halves
            new[node] = graph.node_copy(node, new.__getitem__)
    known.update({node.name: copy for node, copy in new.items()})
    results: Any = part.graph.output_node().args[0]
    return [new[result] for result in results]
