"""A compiled step: its pieces as functions, bound to their tensors and called in order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import ir
from ..ir.step import Slot
from ..lower.inference import Function
from ..torch_inside.tensors import copy_all
from .compile_piece import Emit, compile_on_vectors, compile_piece
from .pieces import Piece, Split, signature

_Source = torch.Tensor | fx.Node  # a kept tensor, or the node of one that is new in each step


@dataclass
class _Call:
    """One piece, bound to its tensors."""

    run: Function
    arguments: list[Any]  # kept tensors; None for those new in each step
    fresh: list[tuple[int, fx.Node, bool]]  # (position, the value's node, whether it is flattened)
    outputs: tuple[fx.Node, ...]
    updates: frozenset[int]  # the parameters (by index) that it updates, if it does nothing else

    def __call__(self, env: dict[fx.Node, torch.Tensor]) -> None:
        arguments = self.arguments.copy()
        for i, node, flattened in self.fresh:
            arguments[i] = _flatten(env[node]) if flattened else env[node]
        results = self.run(arguments)
        if self.outputs:
            env.update(zip(self.outputs, results, strict=True))


@dataclass
class _Batch:
    """Pieces of one kind that compute only scalars: one call, on vectors of these scalars."""

    run: Function
    arguments: list[Any]  # kept tensors; a list of them is stacked
    updates = frozenset[int]()

    def __call__(self, env: dict[fx.Node, torch.Tensor]) -> None:
        self.run([torch.stack(a) if type(a) is list else a for a in self.arguments])


class BoundPieces:
    """A compiled step, bound to its tensors.

    Args:
        held: the tensors that are the same in every step, by slot; `run` gets all others.

    Attributes:
        given: the inputs that `run` takes, by slot.
    """

    def __init__(self, step: Split, held: Mapping[Slot, torch.Tensor], emit: Emit) -> None:
        self.step = step
        self.emit = emit
        self.held = held
        self.results: dict[fx.Node, torch.Tensor] = {}  # those that pieces write to kept memory
        self.calls: list[_Call | _Batch] = []
        for kind in _kinds(step.pieces):
            batch = self._batch(kind) if len(kind) > 1 else None
            self.calls += [batch] if batch is not None else map(self._call, kind)
        self.targets = [held[slot] for slot, _ in step.commits]
        self.values = [self._source(value) for _, value in step.commits]
        self.given = {
            ir.slot_of(n): n
            for piece in step.pieces
            for n in piece.inputs
            if n.op == "placeholder" and ir.slot_of(n) not in held
        }

    def _source(self, node: fx.Node) -> _Source:
        if node.op == "placeholder":
            tensor = self.held.get(ir.slot_of(node))
            return node if tensor is None else tensor.detach()
        return self.results.get(node, node)

    def _call(self, piece: Piece) -> _Call:
        arguments: list[Any] = []
        fresh: list[tuple[int, fx.Node, bool]] = []
        for node in piece.results:
            self.results[node] = _memory(node)
        for i, (node, size) in enumerate(zip(piece.inputs, piece.sizes, strict=True)):
            source = self._source(node)
            flattened = size is not None and self.emit.how == "inductor"
            if isinstance(source, fx.Node):
                fresh.append((i, source, flattened))
                arguments.append(None)
            else:
                arguments.append(_flatten(source) if flattened else source)
        updates = frozenset[int]() if piece.outputs or piece.results else _params_of(piece)
        return _Call(compile_piece(piece, self.emit), arguments, fresh, piece.outputs, updates)

    def _batch(self, kind: Sequence[Piece]) -> _Batch | None:
        """One call of several pieces, if they compute only scalars from kept ones and keep all."""
        columns = list(zip(*(piece.inputs for piece in kind), strict=True))
        differ = [i for i, column in enumerate(columns) if len(set(column)) > 1]
        inputs = len(columns) - len(kind[0].results)
        sources = [[self._source(n) for n in column] for column in columns[:inputs]]
        fresh = any(isinstance(s, fx.Node) for column in sources for s in column)
        if not kind[0].scalars or kind[0].outputs or fresh or not differ:
            return None
        run = compile_on_vectors(kind[0], self.emit, differ)
        if run is None:
            return None
        arguments: list[Any] = [c if i in differ else c[0] for i, c in enumerate(sources)]
        for column in columns[inputs:]:
            arguments.append(vector := _memory(column[0], len(column)))
            self.results.update(zip(column, vector.unbind(), strict=True))
        return _Batch(run, arguments)

    def run(
        self, env: dict[fx.Node, torch.Tensor], left_alone: frozenset[int] = frozenset()
    ) -> None:
        """Do the step, under no_grad and without autocast.

        Args:
            env: the tensors of this step for the inputs in `given`; it is changed.
            left_alone: the parameters (by index) that this step doesn't change.
        """
        for call in self.calls:
            if left_alone and call.updates and call.updates <= left_alone:
                continue
            call(env)
        if self.targets:
            values = [env[v] if isinstance(v, fx.Node) else v for v in self.values]
            copy_all(self.targets, values)


def _params_of(piece: Piece) -> frozenset[int]:
    """The parameters (by index) that a piece reads or writes, or the state of."""
    slots = [ir.slot_of(n) for n in piece.inputs if n.op == "placeholder"]
    return frozenset(slot.index for slot in slots if slot.kind in ("param", "state", "copy"))


def _memory(node: fx.Node, *size: int) -> torch.Tensor:
    """Memory for a 0-d result, or for a vector of such."""
    return torch.empty(size, dtype=ir.dtype(node), device=ir.value(node).device)


def _kinds(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Groups of pieces, in order. Adjacent pieces that compute only scalars are grouped by kind;
    any other piece is alone. (Scalar pieces depend only on what ran before all of them.)
    """
    kinds: list[list[Piece]] = []
    for scalars, run in itertools.groupby(pieces, key=lambda piece: piece.scalars):
        if not scalars:
            kinds += [[piece] for piece in run]
            continue
        alike: dict[object, list[Piece]] = {}
        for piece in run:
            alike.setdefault(signature(piece), []).append(piece)
        kinds += alike.values()
    return kinds


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
