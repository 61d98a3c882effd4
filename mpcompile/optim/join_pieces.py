"""Pieces of a step that cost more to call than to compute: some of them become one.

    join_small      update(p0, g0), ..., update(p31, g31)  ->  4 pieces that update 8 of them each
    keep_results    norm = measure(g)                      ->  measure(g, norm), which writes `norm`

One piece of everything would need the fewest calls, but takes too long to compile, and is right for
one model only. Eight at a time, each flattened to a size of its own, are again one program for all.

A result that is written to memory which is kept needs no new tensor in each step, and so the inputs
of later pieces are the same tensors in each step as well.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from .. import ir
from ..ir import aten
from .pieces import Piece, Split, signature

_AT_ONCE = 8


def join_small(step: Split) -> Split:
    """Join small flat pieces of one kind, `_AT_ONCE` at a time."""
    kinds: dict[object, list[int]] = {}
    for i, piece in enumerate(step.pieces):
        if piece.flat and piece.is_small:
            kinds.setdefault(signature(piece), []).append(i)
    pieces: dict[int, Piece] = dict(enumerate(step.pieces))
    for kind in kinds.values():
        for alike in _by_common_inputs(kind, step.pieces):
            for some in _evenly(alike):
                # Pieces of one kind need nothing of each other, nor does what lies between them.
                pieces[some[-1]] = _joined([pieces.pop(i) for i in some])
    return replace(step, pieces=tuple(pieces[i] for i in sorted(pieces)))


def _by_common_inputs(kind: Sequence[int], pieces: Sequence[Piece]) -> Iterable[Sequence[int]]:
    """Pieces in groups with the same common inputs: each is one input of the joined piece, and that
    is to be one program.
    """
    uses = Counter(node for i in kind for node in pieces[i].inputs)
    groups: dict[object, list[int]] = {}
    for i in kind:
        common = tuple(node for node in pieces[i].inputs if uses[node] > 1)
        groups.setdefault(common, []).append(i)
    return groups.values()


def _evenly(items: Sequence[int]) -> Iterator[Sequence[int]]:
    """The items in parts of at most `_AT_ONCE`, whose lengths differ by at most one: so there are
    at most two programs.
    """
    parts = math.ceil(len(items) / _AT_ONCE)
    for k in range(parts):
        yield items[k * len(items) // parts : (k + 1) * len(items) // parts]


def _joined(pieces: Sequence[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    graph = fx.Graph()
    sizes: dict[fx.Node, int | None] = {}  # of each input, in order
    for k, piece in enumerate(pieces):
        own = zip(piece.inputs, piece.sizes, strict=True)
        sizes.update((node, None if size is None else k) for node, size in own)
    env = {node: _placeholder(graph, f"x{i}", node) for i, node in enumerate(sizes)}
    outputs = [v for piece in pieces for v in _copied(graph, piece, env)]
    graph.output(tuple(outputs))
    return Piece(
        fx.GraphModule(pieces[0].graph, graph),
        tuple(sizes),
        tuple(n for piece in pieces for n in piece.outputs),
        tuple(sizes.values()),
    )


def keep_results(step: Split) -> Split:
    """Let each piece that is compiled write its 0-d results to inputs."""
    return replace(step, pieces=tuple(map(_keeping, step.pieces)))


def _keeping(piece: Piece) -> Piece:
    kept = [n for n in piece.outputs if ir.value(n).ndim == 0]
    if piece.exchanges or not kept:
        return piece
    graph = fx.Graph()
    inputs = (*piece.inputs, *kept)
    env = {node: _placeholder(graph, f"x{i}", node) for i, node in enumerate(inputs)}
    outputs = _copied(graph, piece, env)
    rest: list[fx.Node] = []
    for node, value in zip(piece.outputs, outputs, strict=True):
        if node in kept:
            write = graph.call_function(aten.copy_.default, (env[node], value))
            write.meta = {"val": ir.value(node)}
        else:
            rest.append(value)
    graph.output(tuple(rest))
    return replace(
        piece,
        graph=fx.GraphModule(piece.graph, graph),
        inputs=inputs,
        outputs=tuple(n for n in piece.outputs if n not in kept),
        sizes=(*piece.sizes, *(None for _ in kept)),
        results=tuple(kept),
    )


def _placeholder(graph: fx.Graph, name: str, node: fx.Node) -> fx.Node:
    placeholder = graph.placeholder(name)
    placeholder.meta["val"] = node.meta["val"]
    return placeholder


def _copied(graph: fx.Graph, piece: Piece, inputs: dict[fx.Node, fx.Node]) -> Iterable[fx.Node]:
    """Add a piece's operators to a graph; `inputs`: a node there for each of its inputs. Returns
    what the piece returns.
    """
    own = piece.graph.graph
    places = own.find_nodes(op="placeholder")
    env = {place: inputs[n] for place, n in zip(places, piece.inputs, strict=True)}
    for node in own.nodes:
        if node.op not in ("placeholder", "output"):
            env[node] = graph.node_copy(node, env.__getitem__)
            env[node].meta = dict(node.meta)
    results: Any = own.output_node().args[0]
    return [env[n] for n in results]
