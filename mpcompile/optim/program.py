"""A compiled step: its pieces as functions, bound to their tensors and called in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import ir
from ..ir.step import Slot
from .compile_piece import Emit, compile_on_vectors, compile_piece
from .pieces import Piece, Split, signature

_Source = torch.Tensor | fx.Node  # a kept tensor, or the node of one that is new in each step


@dataclass
class _Call:
    """One piece, bound to its tensors."""

    run: Callable[..., Any]
    arguments: list[Any]  # kept tensors; None for those new in each step
    fresh: list[tuple[int, fx.Node, bool]]  # (position, the value's node, whether it is flattened)
    outputs: tuple[fx.Node, ...]

    def __call__(self, env: dict[fx.Node, torch.Tensor]) -> None:
        arguments = self.arguments.copy()
        for i, node, flattened in self.fresh:
            arguments[i] = _flatten(env[node]) if flattened else env[node]
        env.update(zip(self.outputs, self.run(*arguments), strict=True))


@dataclass
class _Batch:
    """Pieces of one kind that compute only scalars: one call, on vectors of these scalars."""

    run: Callable[..., Any]
    arguments: list[_Source | list[_Source]]  # a list is stacked
    outputs: list[tuple[fx.Node, ...]]  # one tuple for each piece

    def __call__(self, env: dict[fx.Node, torch.Tensor]) -> None:
        def tensor(source: _Source) -> torch.Tensor:
            return env[source] if isinstance(source, fx.Node) else source

        arguments = [
            torch.stack([tensor(s) for s in a]) if isinstance(a, list) else tensor(a)
            for a in self.arguments
        ]
        results = [result.unbind() for result in self.run(*arguments)]
        for nodes, values in zip(self.outputs, zip(*results, strict=True), strict=True):
            env.update(zip(nodes, values, strict=True))


class Program:
    """A compiled step, bound to its tensors.

    Args:
        step: its pieces.
        held: the tensors that are the same in every step, by slot; `run` gets all others.
        emit: how the pieces run.

    Attributes:
        step: its pieces.
        given: the inputs that `run` takes, by slot.
    """

    def __init__(self, step: Split, held: Mapping[Slot, torch.Tensor], emit: Emit) -> None:
        self.step = step
        self.emit = emit
        self.held = held
        self.calls: list[_Call | _Batch] = []
        for kind in _kinds(step.pieces):
            batch = self._batch(kind) if len(kind) > 1 and emit.how == "inductor" else None
            self.calls += [batch] if batch is not None else map(self._call, kind)
        self.targets = [held[slot] for slot, _ in step.commits]
        self.values = [value for _, value in step.commits]
        self.given = {
            ir.slot_of(n): n
            for piece in step.pieces
            for n in piece.inputs
            if n.op == "placeholder" and ir.slot_of(n) not in held
        }

    def _source(self, node: fx.Node) -> _Source:
        tensor = self.held.get(ir.slot_of(node)) if node.op == "placeholder" else None
        return node if tensor is None else tensor.detach()

    def _call(self, piece: Piece) -> _Call:
        arguments: list[Any] = []
        fresh: list[tuple[int, fx.Node, bool]] = []
        flat = piece.flat and self.emit.how == "inductor"
        for i, node in enumerate(piece.inputs):
            source = self._source(node)
            flattened = flat and ir.value(node).ndim > 0
            if isinstance(source, fx.Node):
                fresh.append((i, source, flattened))
                arguments.append(None)
            else:
                arguments.append(_flatten(source) if flattened else source)
        return _Call(compile_piece(piece, self.emit), arguments, fresh, piece.outputs)

    def _batch(self, kind: Sequence[Piece]) -> _Batch | None:
        columns = list(zip(*(piece.inputs for piece in kind), strict=True))
        differ = [i for i, column in enumerate(columns) if len(set(column)) > 1]
        if not kind[0].scalars or not differ:
            return None
        run = compile_on_vectors(kind[0], self.emit, differ)
        if run is None:
            return None
        arguments: list[_Source | list[_Source]] = [
            [self._source(n) for n in column] if i in differ else self._source(column[0])
            for i, column in enumerate(columns)
        ]
        return _Batch(run, arguments, [piece.outputs for piece in kind])

    def run(self, env: dict[fx.Node, torch.Tensor]) -> None:
        """Do the step. `env`: the tensors of this step for the inputs in `given`; it is changed."""
        with torch.no_grad(), torch._C._DisableAutocast():
            for call in self.calls:
                call(env)
            if self.targets:
                torch._foreach_copy_(self.targets, [env[v] for v in self.values])


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
