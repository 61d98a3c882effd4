"""One call of a compiled graph with real data, and what the same call gives uncompiled."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from . import judge
from .draws import State, draw, drawing_from
from .judge import Errors
from .reference import Pair, Reference, ancestors, is_random, written_inputs

__all__ = ["Found", "Trial"]

_JITTERED = 4


@dataclass
class Found:
    """What a comparison has found.

    Attributes:
        verified: how many values were right.
        worst: the largest error of these, in units of the uncompiled value's.
        wrong: the values that are wrong, by number: how far they are off, in a few words.
        vacuous: the numbers of those that prove nothing.
        left_out: how many depend on random numbers that can't be drawn again.
    """

    verified: int = 0
    worst: float = 0.0
    wrong: dict[int, str] = field(default_factory=dict)
    vacuous: set[int] = field(default_factory=set)
    left_out: int = 0


class Trial:
    """One call.

    Attributes:
        nodes: what the graph returns, and then the writes to its inputs.
        saved: what the reference returned, by the name of the node, after `compare`.

    Args:
        gm: the graph.
        inputs: as they were before the call.
        state: of the generators before the call.
        forward: the call of the forward that this backward belongs to: what it saved is computed
            again here from its own inputs; None takes what the compiled forward saved.
        slow: see `Reference`.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        state: State | None,
        forward: Trial | None = None,
        slow: frozenset[torch.dtype] = frozenset(),
    ) -> None:
        self.gm, self._inputs, self._state, self._forward = gm, list(inputs), state, forward
        self._slow = slow
        outputs: Any = gm.graph.output_node().args[0]
        self.nodes: list[Any] = [*outputs, *written_inputs(gm.graph).values()]
        self.saved: dict[str, Pair] = {}

    def compare(
        self, results: Sequence[Any], only: Collection[int] | None = None, *, saves: bool = False
    ) -> Found:
        """Compare what the compiled call returned, and wrote, with the reference.

        Args:
            results: one for each of `nodes`.
            only: the numbers to compare; None: all.
            saves: whether to fill `saved`.
        """
        found, doubtful = Found(), {}
        numbers = self._numbers(only)
        wanted = set(self._numbers(None)) if saves else set(numbers)
        for node, pair in self._values(self._reference(torch.float32), wanted):
            if saves:
                self.saved[node.name] = pair
            for number in numbers.get(node, ()):
                errors = self._errors(results[number], pair)
                if errors is not None and not errors.right:
                    doubtful[number] = errors
                elif errors is not None:
                    self._count(found, number, results[number], errors)
        if doubtful:
            self._settle(found, doubtful, results)
        return found

    @property
    def written(self) -> list[int]:
        """The numbers of the inputs that the graph writes, in the order of `nodes`."""
        places = self.gm.graph.find_nodes(op="placeholder")
        return [places.index(node) for node in written_inputs(self.gm.graph)]

    def inputs(self) -> list[Any]:
        """The inputs as they were before the call, or as the forward's reference saved them."""
        return [pair.low for pair in self._pairs(self._reference(torch.float32))]

    def uncompiled(self) -> list[Any]:
        """What the call returns and writes, computed operator by operator."""
        values = {n: pair.low for n, pair in self._values(
            self._reference(torch.float32), set(self._numbers(None)))}  # fmt: skip
        return [values[n] if isinstance(n, fx.Node) else n for n in self.nodes]

    def _settle(self, found: Found, doubtful: dict[int, Errors], results: Sequence[Any]) -> None:
        """Compare what seems wrong with FP64, and with other results that rounding may give."""
        numbers = self._numbers(doubtful)
        exact: dict[fx.Node, Any] = {}
        for node, pair in self._values(self._reference(torch.float64), set(numbers)):
            exact[node] = pair.wide
            for number in numbers[node]:
                doubtful[number] = judge.errors_of(results[number], pair)
        for seed in range(_JITTERED):
            numbers = self._numbers([n for n, errors in doubtful.items() if not errors.right])
            reference = self._reference(torch.float32, torch.Generator().manual_seed(seed))
            for node, pair in self._values(reference, set(numbers)):
                for number in numbers[node]:
                    moved = Pair(pair.low, exact[node], pair.eps)
                    doubtful[number] |= judge.errors_of(results[number], moved)
        for number, errors in doubtful.items():
            if errors.right:
                self._count(found, number, results[number], errors)
            elif self._is_drawn_elsewhere(self.nodes[number]):
                found.left_out += 1
            else:
                found.wrong[number] = judge.off(errors)

    def _count(self, found: Found, number: int, result: Any, errors: Errors) -> None:
        if judge.is_vacuous(result):
            found.vacuous.add(number)
        else:
            found.verified += 1
            found.worst = max(found.worst, errors.ratio)

    def _errors(self, result: Any, pair: Pair) -> Errors | None:
        if not isinstance(result, torch.Tensor):
            return None
        if result.shape != pair.low.shape or result.dtype is not pair.low.dtype:
            return Errors((1.0,), (0.0,))
        return judge.errors_of(result, pair)

    def _values(
        self, reference: Reference, wanted: Collection[fx.Node]
    ) -> Iterator[tuple[fx.Node, Pair]]:
        pairs = self._pairs(reference)
        with drawing_from(self._state):
            yield from reference.run(self.gm, pairs, wanted)

    def _pairs(self, reference: Reference) -> list[Pair]:
        """The inputs; those that the forward saved as the reference makes them."""
        nodes = self.gm.graph.find_nodes(op="placeholder")
        saved: Mapping[str, Pair] = {}
        if self._forward is not None:
            first = reference.wide is torch.float32 and reference.jitter is None
            saved = self._forward.saved if first else self._forward.saved_anew(reference, nodes)
        return [
            saved[node.name] if node.name in saved else reference.pair(value)
            for node, value in zip(nodes, self._inputs, strict=True)
        ]

    def saved_anew(self, reference: Reference, asked: Sequence[fx.Node]) -> dict[str, Pair]:
        """What a reference that is run in another way saves for a backward."""
        names = {node.name for node in asked}
        wanted = {n for n in self.nodes if isinstance(n, fx.Node) and n.name in names}
        return {node.name: pair for node, pair in self._values(reference, wanted)}

    def _reference(self, wide: torch.dtype, jitter: torch.Generator | None = None) -> Reference:
        return Reference(wide, draw, jitter, self._slow)

    def _numbers(self, only: Collection[int] | None) -> dict[fx.Node, list[int]]:
        found: dict[fx.Node, list[int]] = {}
        for number, node in enumerate(self.nodes):
            if isinstance(node, fx.Node) and (only is None or number in only):
                found.setdefault(node, []).append(number)
        return found

    def _is_drawn_elsewhere(self, node: fx.Node) -> bool:
        """Whether a value depends on random numbers that may have been drawn in another order: by
        torch's own generator, or on a GPU.
        """
        drawn = filter(is_random, ancestors({node}))
        return any(
            str(n.target).startswith("aten") or _device(n) not in (None, "cpu") for n in drawn
        )


def _device(node: fx.Node) -> str | None:
    value = node.meta.get("val")
    return value.device.type if isinstance(value, torch.Tensor) else None
