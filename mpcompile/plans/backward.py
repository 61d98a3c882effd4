"""The backward of a graph, read from the programs that AOTAutograd and its partitioner make of it.

    forward   addmm                seq_nr 121, from our node linear
    backward  mm, mm_1, sum_1      seq_nr 121: they compute the gradients of linear

Autograd numbers the nodes that it records. AOTAutograd notes that number on each node of the
forward that it traces, beside the name of our node (`"from_node"`), and on each node of the
backward. A forward node that autograd doesn't record carries the number of the one before it, so
the first with a number is the one that autograd recorded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import fx

from .. import ir
from .graph_plan import BackwardNode
from .saved_bytes import Saved, counter

__all__ = ["Partitioned"]


class Partitioned:
    """Takes the place of code generation in `emit`, and notes what it is given.

    Args:
        gm: the graph that is emitted.
        names: the nodes of its plan; a node of the backward that comes from another has none.

    Attributes:
        saved: what the forward keeps for the backward.
        backward: the backward, in the order in which it runs. A graph may be compiled in several
            pieces, around recurrent layers; the backward of the layers themselves is not in it.
    """

    def __init__(self, gm: fx.GraphModule, names: Collection[str]) -> None:
        self.saved: list[Saved] = []
        self.backward: tuple[BackwardNode, ...] = ()
        self._names = frozenset(names)
        self._callers = _callers(gm, self._names)
        self._recorded: dict[int, str] = {}  # autograd's number -> the node that it recorded
        self._count: Callable[..., Any] = counter(self.saved)

    def joint(self, graph: fx.Graph) -> None:
        """Read a joint graph, before Inductor's passes drop nodes that compute nothing."""
        for node in graph.nodes:
            number = node.meta.get("seq_nr")
            if number is not None and (source := self._source(node)):
                self._recorded.setdefault(number, source)

    def inner(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Take a partitioned forward or backward; return a function that runs it op by op."""
        if kwargs.get("is_backward"):
            found = tuple(self._described(n) for n in gm.graph.nodes if _computes(n))
            self.backward = (*found, *self.backward)  # a later piece has the earlier backward
        return self._count(gm, example_inputs, **kwargs)

    def _described(self, node: fx.Node) -> BackwardNode:
        tag = node.meta.get("partitioner_tag")
        if node.meta.get("is_gradient_acc"):
            forward = ""  # the sum of the gradients of several readers carries a stale number
        elif tag == "is_backward":
            forward = self._recorded.get(node.meta.get("seq_nr", -1), "")
        else:  # of the forward, or of the body of a backward that the user wrote
            forward = self._source(node)
        return BackwardNode(
            name=node.name,
            op=ir.op_name(node),
            result=ir.type_text(node.meta.get("val")),
            forward=forward,
            recomputed=tag == "is_forward",
        )

    def _source(self, node: fx.Node) -> str:
        """The node of the plan that a node was traced from, or "": the one of that name, or the
        call whose body it is from.
        """
        for source in node.meta.get("from_node", ()):
            name = self._callers.get(source.graph_id, source.name)
            if name in self._names:
                return str(name)
        return ""


def _callers(gm: fx.GraphModule, names: Collection[str]) -> dict[int, str]:
    """The graphs of bodies -> the node of the plan that calls the body. (A checkpoint is no node of
    the plan: the nodes in its body are.)
    """
    found: dict[int, str] = {}
    for node in gm.graph.nodes:
        for operand in node.all_input_nodes:
            body = ir.attribute(gm, operand) if operand.op == "get_attr" else None
            if not isinstance(body, fx.GraphModule):
                continue
            if node.name in names:
                inner = [m for m in body.modules() if isinstance(m, fx.GraphModule)]
                found |= {id(module.graph): node.name for module in inner}
            else:
                found |= _callers(body, names)
    return found


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem
