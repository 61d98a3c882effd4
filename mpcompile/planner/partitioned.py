"""What AOTAutograd and its partitioner make of a graph: the backward, and what is kept for it.

The graphs are made as in training: by Dynamo, AOTAutograd, Inductor's passes on the joint graph and
its min-cut partitioner. Only code generation is replaced: by a function that reads the partitioned
graphs, and runs them op by op.

Kept is each tensor that the forward returns only for the backward, once for each storage (a view
counts as the whole tensor that it is a view of). Not counted are inputs of the graph and views of
them: the model's parameters and buffers, the batch, and the working copies of an `MPOptimizer`,
which exist anyway.

    forward   addmm                seq_nr 121, from our node linear
    backward  mm, mm_1, sum_1      seq_nr 121: they compute the gradients of linear

Autograd numbers the nodes that it records. AOTAutograd notes that number on each node of the
forward that it traces, beside the name of our node (`"from_node"`), and on each node of the
backward. A forward node that autograd doesn't record carries the number of the one before it, so
the first with a number is the one that autograd recorded.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import ir
from ..ir import hint
from ..torch_inside.inductor import boxed
from ..torch_inside.names import OpOverload, TracingContext


@dataclass(frozen=True)
class Saved:
    """One storage that is kept for the backward.

    Attributes:
        op: the operator that computed it.
        module: the module it comes from, with `*` for layer numbers.
        shape, dtype, bytes: of the tensor that the operator computed.
        copied: whether it is an input of the graph in another dtype or layout.
    """

    op: str
    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    copied: bool


@dataclass(frozen=True)
class BackwardNode:
    """One operator of the backward, in the program that AOTAutograd's partitioner makes.

    Attributes:
        name, op: in that program: `"mm_1"`, `"aten::mm"`.
        result: type of its result, `"f16[8, 4]"`.
        forward: the name of the plan's node whose gradient it computes, or that it computes again;
            "" if torch does not tell.
        recomputed: whether it computes a value of the forward again.
    """

    name: str
    op: str
    result: str
    forward: str
    recomputed: bool = False


def saved_by(gm: fx.GraphModule) -> list[Saved]:
    """The storages that a partitioned forward returns for its backward, without inputs."""
    facts = TracingContext.get().fw_metadata
    assert facts is not None
    (results,) = gm.graph.output_node().args
    assert isinstance(results, (list, tuple))
    kept = [n for n in results[facts.tensors_saved_for_backwards_slice] if isinstance(n, fx.Node)]
    roots = dict.fromkeys(root for n in kept if (root := _root(n)).op != "placeholder")
    return [_describe(root) for root in roots]


def _root(node: fx.Node) -> fx.Node:
    """The node that this one is a view of, or the node itself."""
    while True:
        source = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, fx.Node):
            return node
        if not (_is_view(node) or (node.target is operator.getitem and _is_view(source))):
            return node
        node = source


def _is_view(node: fx.Node) -> bool:
    if node.target in (torch.ops.aten._unsafe_view.default, torch.ops.aten.alias.default):
        return True
    return isinstance(node.target, OpOverload) and node.target.is_view


def _describe(node: fx.Node) -> Saved:
    value = node.meta["val"]
    words = ir.module_path(node).split(".")
    target = node.args[0].target if node.target is operator.getitem else node.target  # type: ignore[union-attr]
    return Saved(
        op=str(getattr(target, "__name__", target)).removesuffix(".default"),
        module=".".join("*" if word.isdigit() else word for word in words),
        shape=tuple(map(hint, value.shape)),
        dtype=value.dtype,
        bytes=ir.bytes_of(value),
        copied=_is_copy(node),
    )


def _is_copy(node: fx.Node) -> bool:
    """Whether the node is an input of the graph in another dtype or layout."""
    aten = torch.ops.aten
    relaid = (aten.clone.default, aten.constant_pad_nd.default, aten._to_copy.default)
    while node.op == "call_function":
        cast = node.target is torch.ops.prims.convert_element_type.default
        if not (cast or node.target in relaid or _is_view(node)):
            return False
        (node,) = node.all_input_nodes or (node.graph.output_node(),)
    return node.op == "placeholder"


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

    def joint(self, graph: fx.Graph) -> None:
        """Read a joint graph, before Inductor's passes drop nodes that compute nothing."""
        for node in graph.nodes:
            number = node.meta.get("seq_nr")
            if number is not None and (source := self._source(node)):
                self._recorded.setdefault(number, source)

    def inner(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Take a partitioned forward or backward; return a function that runs it op by op."""
        if kwargs.get("is_backward"):
            calls = (n for n in gm.graph.nodes if n.op == "call_function")
            found = tuple(self._described(n) for n in calls if not ir.is_getitem(n))
            self.backward = (*found, *self.backward)  # a later piece has the earlier backward
        elif not kwargs.get("is_inference"):
            self.saved += saved_by(gm)

        def call(args: list[Any]) -> Any:
            inputs = list(args)
            args.clear()
            return gm(*inputs)

        return boxed(call)

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
