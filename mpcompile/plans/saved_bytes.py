"""Counts the bytes kept between forward and backward, in the graphs that torch.compile partitions.

The graphs are made as in training: by Dynamo, AOTAutograd, Inductor's passes on the joint graph and
its min-cut partitioner. Only code generation is replaced: by a function that reads from the
partitioned forward what it keeps for the backward, and runs it op by op.

Counted is each tensor that the forward returns only for the backward, once for each storage (a view
counts as the whole tensor that it is a view of). Not counted are inputs of the graph and views of
them: the model's parameters and buffers, the batch, and the working copies of an `MPOptimizer`,
which exist anyway.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ir import hint
from ..torch_inside.inductor import boxed
from ..torch_inside.names import OpOverload, TracingContext

__all__ = ["Saved", "counter", "saved_by"]


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

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**dataclasses.asdict(self), "dtype": str(self.dtype).removeprefix("torch.")}


def counter(found: list[Saved]) -> Callable[..., Any]:
    """A replacement for Inductor's code generation (`inner_compile`) that adds to `found`."""

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        if not (kwargs.get("is_backward") or kwargs.get("is_inference")):
            found.extend(saved_by(gm))

        def call(args: list[Any]) -> Any:
            inputs = list(args)
            args.clear()
            return gm(*inputs)

        return boxed(call)

    return compile_graph


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
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    path = str(list(stack.values())[-1][0]).partition(".")[2] or str(list(stack.values())[-1][0])
    words = re.findall(r"\w+", path)
    target = node.args[0].target if node.target is operator.getitem else node.target  # type: ignore[union-attr]
    return Saved(
        op=str(getattr(target, "__name__", target)).removesuffix(".default"),
        module=".".join("*" if word.isdigit() else word for word in words),
        shape=tuple(map(hint, value.shape)),
        dtype=value.dtype,
        bytes=hint(value.numel()) * value.element_size(),
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
