"""Edits of a graph: operands, new calls, new inputs; and what a value is computed from. Each edit
keeps `meta["val"]` correct.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy
from typing_extensions import Self

from ..torch_inside.graphs import schema, set_source, set_sources, source_of, sources_of
from ..torch_inside.names import enable_python_dispatcher
from .marks import Mark, Role, added, set_mark
from .shapes import Path, Size, known_equal
from .values import aten, fake_mode, positions, value

T = TypeVar("T")


def operands(node: fx.Node) -> dict[Path, fx.Node]:
    """The node's operands that are nodes, by their position in its arguments."""
    found: dict[Path, fx.Node] = {}
    for position, argument in positions(node):
        if isinstance(argument, fx.Node):
            found[position,] = argument
        elif isinstance(argument, (tuple, list)):
            for i, item in enumerate(argument):
                if isinstance(item, fx.Node):
                    found[position, i] = item
    return found


def set_operand(node: fx.Node, path: Path, value: fx.node.Argument) -> None:
    """Replace the operand at a position."""
    position, *rest = path
    if position < len(node.args):
        node.update_arg(position, _replaced(node.args[position], rest, value))
        return
    name = schema(node.target).arguments[position].name
    node.update_kwarg(name, _replaced(node.kwargs.get(name), rest, value))


def _replaced(argument: fx.node.Argument, path: list[int], value: fx.node.Argument) -> Any:
    if not path:
        return value
    items = list(argument)  # type: ignore[arg-type]
    items[path[0]] = value
    return items


def argument(node: fx.Node, name: str) -> Any:
    """An operator's argument by its name in the schema; its default where it isn't given."""
    for position, declared in enumerate(schema(node.target).arguments):
        if declared.name == name:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, declared.default_value)
    raise KeyError(f"{node.target} has no argument {name!r}")


def position_of(node: fx.Node, name: str) -> int:
    """The place of an argument in the operator's schema."""
    return [declared.name for declared in schema(node.target).arguments].index(name)


def refresh(node: fx.Node) -> None:
    """Recompute `meta["val"]` from the inputs' values; call this when an input changed dtype."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    # The mode is on so that tensors that a decomposition creates (SDPA makes a mask) are fake too.
    with fake_mode(node.graph), enable_python_dispatcher():
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def restore(node: fx.Node) -> None:
    """Set `meta["val"]` back to the captured value; call this once the inputs are as captured."""
    node.meta["val"] = node.meta["mp_captured"]


def new_call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Add a call at the graph's insertion point, with its value."""
    node = graph.call_function(target, args, kwargs)
    refresh(node)
    return node


def insert(target: Any, *args: Any, name: str, like: fx.Node, decision: Mark) -> fx.Node:
    """Add a call at the graph's insertion point, with its value and the provenance of `like`."""
    node = like.graph.create_node("call_function", target, args, name=name)
    for key in ("stack_trace", "nn_module_stack", "mp_region", "mp_grad"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    refresh(node)
    set_mark(node, decision)
    return node


def after(node: fx.Node) -> fx.Node:
    """The first node before which a user of `node` may stand: placeholders stay in one block."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following


def copy_to_write(node: fx.Node, source: fx.Node, decision: Mark) -> fx.Node:
    """Add a copy of an input, which the graph is to write in its place, right after `source`, which
    shows the input.
    """
    name, clone = f"{node.name}_own", torch.ops.aten.clone.default
    with node.graph.inserting_before(after(source)):
        own = insert(clone, source, name=name, like=node, decision=decision)
    own.meta["mp_captured"] = node.meta["mp_captured"]
    # The backward must not compute it again: by then the input holds what was written.
    own.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return own


def add_input(
    graph: fx.Graph, name: str, val: torch.Tensor, like: fx.Node | None = None
) -> fx.Node:
    """Add an input after the last one; autograd tracks it if it tracks `like`."""
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    set_source(node, None)
    # "tensor_dict" is where Dynamo notes that a parameter keeps its address.
    kept = ("mp_captured", "tensor_meta", "tensor_dict")
    theirs = like.meta if like is not None else {}
    node.meta.update({k: theirs[k] for k in kept if k in theirs}, val=val)
    return node


def first_call(graph: fx.Graph) -> fx.Node:
    """The first node that is no placeholder; a node put before it runs before all others."""
    first: fx.Node = next(node for node in graph.nodes if node.op != "placeholder")
    return first


def cut(
    nodes: Iterable[fx.Node], inputs: Iterable[fx.Node]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Some nodes, in their order, as a graph of their own that lacks its output, and what each node
    is in it: of an input that is computed, too, the latter. Attributes of the module (constants,
    bodies) that they read are read there as well.
    """
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        new[node] = graph.placeholder(node.name)
        new[node].meta = dict(node.meta)  # "tensor_dict": is its address static?
        set_source(new[node], source_of(node) if node.op == "placeholder" else None)

    def of(node: fx.Node) -> fx.Node:
        if node not in new:
            assert node.op == "get_attr", f"{node.name} is no input"
            new[node] = graph.node_copy(node)
        return new[node]

    for node in nodes:
        new[node] = graph.node_copy(node, of)
    return graph, new


@dataclass(frozen=True, eq=False)
class Section:
    """Nodes of a graph that are handled together.

    Attributes:
        nodes: in order.
        inputs: the values from outside that they read; no attributes of the module.
        outputs: those of the nodes that are read outside.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @classmethod
    def of(cls, nodes: Iterable[fx.Node], **more: Any) -> Self:
        """These nodes; `more`: what a class below this one has besides."""
        own = dict.fromkeys(nodes)
        read = dict.fromkeys(i for n in own for i in n.all_input_nodes if i not in own)
        inputs = tuple(n for n in read if n.op != "get_attr")
        outputs = (n for n in own if any(user not in own for user in n.users))
        return cls(tuple(own), inputs, tuple(outputs), **more)

    def alone(self, gm: fx.GraphModule) -> fx.GraphModule:
        """The section of Dynamo's graph `gm` as a graph of its own, which returns a tuple."""
        graph, new = cut(self.nodes, self.inputs)
        graph.output(tuple(new[node] for node in self.outputs))
        return module_of(graph, gm)


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy whose nodes have the same names, to be kept where the other is changed."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, env)
    graph.output(result).meta.update(gm.graph.output_node().meta)
    for old, new in env.items():
        new.name = old.name
    made = fx.GraphModule(gm, graph)
    made.meta.update(gm.meta)
    return made


def module_of(graph: fx.Graph, gm: fx.GraphModule) -> fx.GraphModule:
    """A part of Dynamo's graph `gm` with the notes that AOTAutograd reads from Dynamo's graphs."""
    part = fx.GraphModule(gm, graph)
    part.meta = dict(gm.meta)
    set_sources(part, sources_of(gm))
    return part


def reached(starts: Iterable[T], further: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """These, and all that `further` leads to from them, each once, the nearest first."""
    found = dict.fromkeys(starts)
    for one in (waiting := list(found)):  # the list grows as it is read
        yield one
        new = dict.fromkeys(n for n in further(one) if n not in found)
        found.update(new)
        waiting += new


def all_before(nodes: Iterable[fx.Node], known: Collection[fx.Node] = ()) -> set[fx.Node]:
    """These nodes, and all that they depend on, up to those that are known."""
    starts = set(nodes)
    ends = set(known) - starts
    return set(reached(starts, lambda n: () if n in ends else n.all_input_nodes))


def cut_to(
    node: fx.Node,
    shape: Sequence[Size],
    why: str,
    argument: Callable[[Size], Any] = lambda size: size,
) -> fx.Node:
    """Insert, at the graph's insertion point, the cuts that leave of a padded value the part of
    this shape; `argument` makes a size what a call takes. Returns the last of them.
    """
    cut = node
    for dim, (now, new) in enumerate(zip(value(node).shape, shape, strict=True)):
        if not known_equal(now, new):
            args, decision = (cut, dim, 0, argument(new)), added(Role.PAD, f"{now} -> {new}: {why}")
            name = f"{node.name}_cut"
            cut = insert(aten.slice.Tensor, *args, name=name, like=node, decision=decision)
    return cut
