"""One call of a compiled graph with real data, and what the same call gives uncompiled.

Each value that the call returns or writes is compared with one computed of the nearest others: so
no error adds up, and what is looked at is what one kernel, or a few, make.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from .. import ir
from ..devices.registry import RandomState, capabilities
from . import judge
from .draws import is_random
from .judge import Errors
from .reference import Pair, Reference, is_product, written_inputs

_JITTERED = 4
_DEPTH = 6
"""Operators in a row by which two values are of one kind."""
_MEMORY = 0.5  # of what is free
_SIZES = 3  # a value in its dtype, and one of twice the size


@dataclass
class Found:
    """What a comparison has found.

    Attributes:
        verified: how many values were right.
        worst: the largest error of these, in units of the uncompiled value's.
        wrong: the values that are wrong, by number: how far they are off, in a few words.
        vacuous: the numbers of those that prove nothing.
        left_out: how many depend on random numbers that can't be drawn again.
        rest: how many weren't compared, since another of the same kind was.
        late: the numbers of those that weren't compared since it would have taken too long.
    """

    verified: int = 0
    worst: float = 0.0
    wrong: dict[int, str] = field(default_factory=dict)
    vacuous: set[int] = field(default_factory=set)
    left_out: int = 0
    rest: int = 0
    late: set[int] = field(default_factory=set)


class Trial:
    """One call.

    Attributes:
        nodes: what the graph returns, and then the writes to its inputs.

    Args:
        gm: the graph.
        inputs: as they were before the call.
        state: of the generators before the call.
        slow: see `Reference`.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        state: RandomState | None,
        slow: frozenset[torch.dtype] = frozenset(),
    ) -> None:
        self.gm, self.inputs, self._state = gm, list(inputs), state
        self._reference = Reference(torch.float32, slow=slow)
        written = written_inputs(gm.graph)
        results: Any = gm.graph.output_node().args[0]
        # An input that is written and returned is what was written, such as a count of calls.
        outputs = [written.get(node, node) for node in results]
        self.nodes: list[Any] = [*outputs, *written.values()]

    def part_that_fits(self) -> Collection[int] | None:
        """The numbers of the values that can be computed once more in the memory that is free, as
        estimated: the first half, fourth and so on of them; None: all.
        """
        free = _MEMORY * _free(self.inputs)
        if _peak(self.gm, self.nodes) <= free:
            return None
        count = len(self.nodes)
        while count := count // 2:
            if _peak(self.gm, self.nodes[:count]) <= free:
                break
        return range(count)

    def compare(
        self, results: Sequence[Any], only: Collection[int] | None = None, seconds: float = 0.0
    ) -> Found:
        """Compare what the compiled call returned, and wrote, with the reference.

        Args:
            results: one for each of `nodes`.
            only: the numbers to compare, whatever it takes; None: one of each kind, and all if
                there is time.
            seconds: what it may take.
        """
        found, end = Found(), time.perf_counter() + seconds
        if only is not None:
            self._compare(found, results, only)
            return found
        kinds = self._kinds()
        first = [number for number, kind in enumerate(kinds) if kind not in kinds[:number]]
        edge = self._known(results)
        first.sort(key=lambda number: self._cost(self.nodes[number], edge))
        half = (len(first) + 1) // 2
        self._compare(found, results, first[:half], end=end, least=1)
        self._compare(found, results, first[half:], end=end)
        rest = [number for number, kind in enumerate(kinds) if kind and number not in first]
        left = end - time.perf_counter()
        if rest and (found.late or (seconds - left) * (1 + len(rest) / len(first)) > left):
            found.rest = len(rest)
        elif rest:
            self._compare(found, results, rest, end=end)
        return found

    def uncompiled(self) -> list[Any]:
        """What the call returns and writes, computed operator by operator."""
        values = self._values(self._reference, set(self._numbers(None)), {})
        low = {node: pair.low for node, pair in values}
        return [low[n] if isinstance(n, fx.Node) else n for n in self.nodes]

    def _compare(
        self, found: Found, results: Sequence[Any], only: Collection[int], **limits: Any
    ) -> None:
        known, numbers = self._known(results), self._numbers(only)
        doubtful: dict[int, Errors] = {}
        late = {n for some in numbers.values() for n in some}
        for node, pair in self._values(self._reference, set(numbers), known, **limits):
            late.difference_update(numbers[node])
            for number in numbers[node]:
                errors = _errors(results[number], pair)
                if errors is not None and not errors.right:
                    doubtful[number] = errors
                elif errors is not None:
                    self._count(found, number, results[number], errors)
        found.late |= late
        if doubtful:
            self._settle(found, doubtful, results, known)

    def _settle(
        self,
        found: Found,
        doubtful: dict[int, Errors],
        results: Sequence[Any],
        known: Mapping[fx.Node, Any],
    ) -> None:
        """Compare what seems wrong with FP64, and with other results that rounding may give."""
        numbers = self._numbers(doubtful)
        exact: dict[fx.Node, Any] = {}
        widest = replace(self._reference, wide=torch.float64)
        for node, pair in self._values(widest, set(numbers), known):
            exact[node] = pair.wide
            for number in numbers[node]:
                doubtful[number] = _errors(results[number], pair) or Errors((), ())
        for seed in range(_JITTERED):
            numbers = self._numbers([n for n, errors in doubtful.items() if not errors.right])
            reference = replace(self._reference, jitter=torch.Generator().manual_seed(seed))
            for node, pair in self._values(reference, set(numbers), known):
                for number in numbers[node]:
                    moved = pair._replace(wide=exact[node])
                    doubtful[number] |= _errors(results[number], moved) or Errors((), ())
        for number, errors in doubtful.items():
            if errors.right:
                self._count(found, number, results[number], errors)
            elif self._is_drawn_elsewhere(self.nodes[number]):
                found.left_out += 1
            else:
                found.wrong[number] = judge.off(errors)

    def _count(self, found: Found, number: int, result: Any, errors: Errors) -> None:
        tells = errors.compiled or not result.numel()
        if not tells or (judge.is_vacuous(result) and _varies(self.nodes[number])):
            found.vacuous.add(number)
        else:
            found.verified += 1
            found.worst = max(found.worst, errors.ratio)

    def _values(
        self,
        reference: Reference,
        wanted: Collection[fx.Node],
        known: Mapping[fx.Node, Any],
        **limits: Any,
    ) -> Iterator[tuple[fx.Node, Pair]]:
        if wanted:
            with self._state.again() if self._state is not None else contextlib.nullcontext():
                yield from reference.run(self.gm, self.inputs, wanted, known, **limits)

    def _known(self, results: Sequence[Any]) -> dict[fx.Node, Any]:
        """What the call returned, by node; not its inputs and not what it wrote to them."""
        outputs = zip(self.nodes, results, strict=True)
        return {
            n: value for n, value in outputs
            if isinstance(n, fx.Node) and n.op == "call_function" and not ir.written(n)
        }  # fmt: skip

    def _cost(self, node: Any, known: Collection[fx.Node]) -> float:
        """About what it takes to compute a value, by the bytes that are read and written for it: so
        what is large doesn't use up the time of all others.
        """
        return sum(map(_bytes, ir.all_before([node], known))) if isinstance(node, fx.Node) else 0.0

    def _kinds(self) -> list[int | None]:
        """For each of `nodes` what it is computed by, from other results, inputs and products; None
        for what is no value of the graph's.
        """
        edge = {n for n in self.nodes if isinstance(n, fx.Node)}
        types = {n: hash(ir.type_text(n.meta.get("val"))) for n in self.gm.graph.nodes}
        own = {
            n: hash((n.target, str(fx.node.map_arg((n.args, n.kwargs), lambda _: 0))))
            for n in self.gm.graph.nodes
            if n.op == "call_function"
        }
        kinds = types
        for _ in range(_DEPTH):
            seen = {n: types[n] if n in edge or is_product(n) else k for n, k in kinds.items()}
            kinds = {
                n: hash((own[n], *(seen[i] for i in n.all_input_nodes))) if n in own else types[n]
                for n in self.gm.graph.nodes
            }
        return [
            kinds[n] if isinstance(n, fx.Node) and n.op == "call_function" else None
            for n in self.nodes
        ]

    def _numbers(self, only: Collection[int] | None) -> dict[fx.Node, list[int]]:
        found: dict[fx.Node, list[int]] = {}
        for number, node in enumerate(self.nodes):
            wanted = only is None or number in only
            if wanted and isinstance(node, fx.Node):
                found.setdefault(node, []).append(number)
        return found

    def _is_drawn_elsewhere(self, node: fx.Node) -> bool:
        """Whether a value depends on random numbers that may have been drawn in another order: by
        torch's own generator, or on a GPU.
        """
        drawn = filter(is_random, ir.all_before({node}))
        return any(str(n.target).startswith("aten") or _is_on_device(n) for n in drawn)


def _errors(result: Any, pair: Pair) -> Errors | None:
    """How far a result is off; None where it is no tensor."""
    if not isinstance(result, torch.Tensor):
        return None
    if result.shape != pair.low.shape or result.dtype is not pair.low.dtype:
        return Errors((1.0,), (0.0,))
    return judge.errors_of(result, pair)


def _varies(node: fx.Node) -> bool:
    """Whether a value isn't the same in each call, as constants are and counts of what seldom
    happens, such as overflows: the data reaches it by other ways than by comparisons.
    """
    compared = [n for n in ir.all_before({node}) if n is not node and _is_bool(n)]
    return any(n.op == "placeholder" for n in ir.all_before({node}, compared) if n not in compared)


def _is_bool(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def _is_on_device(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and capabilities(value.device).asynchronous


def _peak(gm: fx.GraphModule, nodes: Sequence[Any]) -> float:
    """Bytes of values that live together at most, in both runs."""
    needed = ir.all_before([n for n in nodes if isinstance(n, fx.Node)])
    order = [node for node in gm.graph.nodes if node in needed and node.op != "placeholder"]
    uses = Counter(arg for node in order for arg in node.all_input_nodes)
    live = peak = 0.0
    for node in order:
        live += _bytes(node)
        peak = max(peak, live)
        for arg in node.all_input_nodes:
            uses[arg] -= 1
            if not uses[arg] and arg.op != "placeholder":
                live -= _bytes(arg)
    return _SIZES * peak


def _bytes(node: fx.Node) -> int:
    return ir.bytes_of(node.meta.get("val"))


def _free(inputs: Sequence[Any]) -> float:
    """Bytes that are free where the inputs lie; without end where nobody tells."""
    first = next((x.device for x in inputs if isinstance(x, torch.Tensor)), None)
    free = capabilities(first).free_memory() if first is not None else None
    return math.inf if free is None else free
