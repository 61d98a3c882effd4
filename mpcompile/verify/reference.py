"""A graph run operator by operator on real tensors, in its own dtypes and in wider ones.

What is compiled rounds less often than the graph says: a fused kernel keeps FP32 between operators.
So a compiled value is right if it is about as far from the exact one as an uncompiled value is. The
wide run stands for the exact one: every FP16 and BF16 value is FP32 in it, and all are FP64 where
FP32 is what is judged.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg
from torch.utils.flop_counter import flop_registry

from ..ir.dtypes import HALF
from ..ir.edit import all_before
from ..ir.values import attribute
from ..torch_inside.graphs import schema_of
from ..torch_inside.names import pytree
from .draws import draw, is_random

aten, prims = torch.ops.aten, torch.ops.prims

_CASTS = (prims.convert_element_type.default, aten._to_copy.default)
_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class Pair(NamedTuple):
    """A value as the graph computes it, and in wider dtypes.

    Attributes:
        low, wide: the two; one object if they are the same.
        eps: of the least precise dtype that it was computed in; 0 for what isn't floating.
        same: whether they are equal, in any dtypes.
    """

    low: Any
    wide: Any
    eps: float = 0.0
    same: bool = False


@dataclass(frozen=True)
class Reference:
    """How a graph is run.

    Attributes:
        wide: what FP16 and BF16 values are in the wide run: FP32, or FP64 for those of FP32, too.
        jitter: moves each result of the run in the graph's dtypes by up to a rounding, at random:
            another of the results that rounding may give. None: none is moved.
        slow: dtypes that the device multiplies slowly: it multiplies in FP32 and rounds once.
    """

    wide: torch.dtype
    jitter: torch.Generator | None = None
    slow: frozenset[torch.dtype] = frozenset()

    def pair(self, value: Any, eps: float = 0.0) -> Pair:
        """A value that both runs begin with."""
        return Pair(value, self._widened(value), max(eps, _eps(value)), same=True)

    def run(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        wanted: Collection[fx.Node],
        known: Mapping[fx.Node, Any],
        end: float = math.inf,
        least: int = 0,
    ) -> Iterator[tuple[fx.Node, Pair]]:
        """The wanted nodes with their values, in the graph's order; other values die early, and
        inputs are widened late.

        A write to an input is the value of its `copy_`, and changes nothing.

        Args:
            gm: a graph that `why_not` doesn't refuse.
            inputs: its inputs.
            wanted: what is asked for.
            known: values of nodes that others are computed of, in place of their own.
            end: when it stops, in seconds of `time.perf_counter`.
            least: how many it gives in any case.
        """
        needed = all_before(wanted, known)
        env: dict[fx.Node, Pair] = {}
        nodes = [node for node in gm.graph.nodes if node in needed]
        uses = Counter(arg for node in nodes for arg in node.all_input_nodes)
        given = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
        for node in nodes:
            if least <= 0 and time.perf_counter() > end:
                return
            if node.op == "placeholder":
                if node not in wanted:
                    continue
                env[node] = self.pair(given[node])
            elif node.op == "get_attr":
                env[node] = self.pair(attribute(gm, node))
            elif node in known and node not in wanted:
                env[node] = self._known(known[node])
            else:
                late = [n for n in node.all_input_nodes if n in given and n not in env]
                env.update((n, self.pair(given[n])) for n in late)
                env[node] = self._call(node, env)
            if node in wanted:
                least -= 1
                yield node, env[node]
                if node in known:
                    env[node] = self._known(known[node])
            for arg in (*node.all_input_nodes, node):
                uses[arg] -= arg is not node
                if uses[arg] <= 0:
                    env.pop(arg, None)

    def _known(self, value: Any) -> Pair:
        """A value that the compiled program has rounded, though it may go on with it unrounded."""
        pair = self.pair(value)
        moved = self._moved(value) if self.jitter is not None else value
        return pair if moved is value else pair._replace(low=moved, same=False)

    def _call(self, node: fx.Node, env: Mapping[fx.Node, Pair]) -> Pair:
        read = [env[arg] for arg in node.all_input_nodes]
        eps = max((pair.eps for pair in read), default=0.0)
        if _writes_input(node):
            into, value = read[0].low, read[-1]
            low = torch.empty_like(into).copy_(value.low)
            wide = low if value.wide is value.low else torch.empty_like(self._widened(into))
            return Pair(low, low if wide is low else wide.copy_(value.wide), max(eps, _eps(low)))
        args, kwargs = _arguments(node, env, attrgetter("low"))
        if is_random(node):
            return self.pair(draw(node, args, kwargs), eps)
        low = self._low(node, args, kwargs)
        eps = max(eps, *map(_eps, pytree.tree_leaves(low)), 0.0)
        same = all(pair.same for pair in read)
        keeps = same and (not _is_new(node) or node.target in _CASTS) and not _narrows(read, low)
        if (keeps or all(pair.wide is pair.low for pair in read)) and not self._widens(low):
            moved = self.jitter is not None and _is_new(node)
            return Pair(low, low, eps, same and not moved)
        given = _arguments(node, env, attrgetter("wide"))
        try:
            wide = _called(node, *map_aggregate(given, self._dtype))
            if not _alike(low, wide):
                raise TypeError("it means something else in a wider dtype")
        except (RuntimeError, TypeError, NotImplementedError, IndexError):
            # It takes no other dtype, or is about the bits: it gets what the graph would give it.
            wide = pytree.tree_map(self._widened, _called(node, *_arguments(node, env, _narrowed)))
        return Pair(low, wide, eps, keeps and self.jitter is None)

    def _low(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        halves = {v.dtype for v in pytree.tree_leaves(args) if _is_half(v)}
        if is_product(node) and halves and halves <= self.slow:
            up = pytree.tree_map(lambda v: v.float() if _is_half(v) else v, args)
            meant = node.meta["val"]
            low = pytree.tree_map(lambda v, like: v.to(like.dtype) if _is_tensor(v) else v,
                           _called(node, up, kwargs), meant)  # fmt: skip
        else:
            low = _called(node, args, kwargs)
        return pytree.tree_map(self._moved, low) if self.jitter and _is_new(node) else low

    def _moved(self, value: Any) -> Any:
        if not _is_tensor(value) or not value.dtype.is_floating_point:
            return value
        wide = torch.promote_types(value.dtype, torch.float32)
        by = torch.rand(value.shape, generator=self.jitter, dtype=wide).to(value.device)
        return by.mul_(2).sub_(1).mul_(torch.finfo(value.dtype).eps).add_(1).mul_(value).to(value)

    def _widened(self, value: Any) -> Any:
        if not _is_tensor(value):
            return value
        dtype = self._dtype(value.dtype)
        return value if dtype is value.dtype else value.to(dtype)

    def _widens(self, value: Any) -> bool:
        tensors = filter(_is_tensor, pytree.tree_leaves(value))
        return any(self._dtype(v.dtype) is not v.dtype for v in tensors)

    def _dtype(self, value: Any) -> Any:
        """The dtype that one of the graph's has in the wide run; anything else as it is."""
        if not isinstance(value, torch.dtype):
            return value
        if value in HALF:
            return self.wide
        return _WIDER.get(value, value) if self.wide is torch.float64 else value


def _narrows(read: Sequence[Pair], low: Any) -> bool:
    """Whether a result is of a less precise dtype than what it is made of."""
    return _is_tensor(low) and any(_eps(pair.low) < _eps(low) for pair in read)


def is_product(node: fx.Node) -> bool:
    """Whether an operator multiplies matrices, convolves or attends: a library does it."""
    return getattr(node.target, "overloadpacket", None) in flop_registry


def why_not(graph: fx.Graph) -> str | None:
    """Why a graph can't be run a second time, operator by operator; None if it can."""
    for node in graph.find_nodes(op="call_module"):
        return f"it calls a module ({node.target})"
    for node in graph.nodes:
        schema = schema_of(node.target)
        if node.op != "call_function" or schema is None:
            continue
        if "c10d" in schema.name:
            return "it exchanges values with other processes"
        if schema.is_mutable and not _writes_input(node):
            return f"{schema.name} writes in place"
    return None


def written_inputs(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The inputs that a graph writes, and the `copy_` that does it."""
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    return {copy.args[0]: copy for copy in copies if _writes_input(copy)}


def written_numbers(graph: fx.Graph) -> list[int]:
    """The numbers of these inputs, in the same order."""
    places = graph.find_nodes(op="placeholder")
    return [places.index(node) for node in written_inputs(graph)]


def _writes_input(node: fx.Node) -> bool:
    into = node.args[0] if node.target is aten.copy_.default else None
    return isinstance(into, fx.Node) and into.op == "placeholder"


def _called(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """What an operator gives; where it is about strides, those that the graph was traced with."""
    if node.target is aten.view.default:
        return args[0].reshape(args[1])
    if node.target is aten.as_strided.default:
        meant = node.args[0].meta["val"]  # type: ignore[union-attr]
        if args[0].stride() != meant.stride():
            args = (
                args[0].new_empty_strided(meant.shape, meant.stride()).copy_(args[0]),
                *args[1:],
            )
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _arguments(node: fx.Node, env: Mapping[fx.Node, Pair], of: Callable[[Pair], Any]) -> Any:
    """What a node is called with, of each operand what `of` takes of its values."""
    return map_arg((node.args, node.kwargs), lambda n: of(env[n]))


def _narrowed(pair: Pair) -> Any:
    """The wide value in the dtypes of the graph."""
    return pytree.tree_map(
        lambda wide, low: wide.to(low) if _is_tensor(wide) else wide, pair.wide, pair.low
    )


def _is_new(node: fx.Node) -> bool:
    """Whether the result is memory of its own: no view."""
    schema = schema_of(node.target)
    return schema is not None and all(r.alias_info is None for r in schema.returns)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in HALF


def _eps(value: Any) -> float:
    floating = _is_tensor(value) and (value.dtype.is_floating_point or value.dtype.is_complex)
    return torch.finfo(value.dtype).eps if floating else 0.0


def _alike(low: Any, wide: Any) -> bool:
    """Whether two results have the same shapes, and are numbers of the same kind."""
    pairs = list(zip(pytree.tree_leaves(low), pytree.tree_leaves(wide), strict=True))
    return all(
        not _is_tensor(a)
        or (a.shape == b.shape and a.dtype.is_floating_point is b.dtype.is_floating_point)
        for a, b in pairs
    )
