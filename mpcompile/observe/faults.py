"""Which node went wrong first, and which nodes to keep in FP32 so that it doesn't.

    OVERFLOW    a value is not finite, and is in FP32
    BACKWARD    a gradient is not finite, and is in FP32
    OWN         a value or gradient is not finite, and isn't in FP32 either: no pin helps
    UNDERFLOW   a gradient has become zero
    INACCURATE  a value is far off, though what it was computed from is not

A value that is not finite is often intended: the -inf of a mask. So what counts is that there are
more of them than in FP32, or, for OWN, that a result or a gradient of the graph is hit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import isinf, isnan

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .. import ir
from ..inspect.graph_plan import GraphPlan, PlanNode
from ..ir.dtypes import HALF
from .fault import Fault, Kind, Runs
from .numbers import Numbers
from .record import BackwardStep
from .watch import source_of_value

# A gradient of which this share of the elements is lost, and that is off by as much, is a fault.
LOST = 0.5
# A value that is off by more than this share of its norm is a fault, if it is also off ten times as
# far as what it was computed from, and as in FP32.
INACCURATE = 0.1
# Values above this share of the dtype's range are taken for values that may leave it.
NEAR = 0.5


def find(graph: fx.Graph, plan: GraphPlan, runs: Runs) -> list[Fault]:
    """What went wrong in one run of a graph, most serious first.

    Args:
        graph: the rewritten graph, before checkpoints are folded back.
        plan: its plan.
        runs: what was recorded.
    """
    finder = _Finder(graph, plan, runs)
    found = finder.overflow() or finder.own() or finder.backward()
    return [found, *finder.inaccurate()] if found else [*finder.inaccurate(), *finder.underflow()]


class _Finder:
    def __init__(self, graph: fx.Graph, plan: GraphPlan, runs: Runs) -> None:
        self.graph, self.runs = graph, runs
        self.nodes = {n.name: n for n in graph.nodes}
        self.lines: Mapping[str, PlanNode] = {line.name: line for line in plan.nodes}
        self.order = {n: i for i, n in enumerate(graph.nodes)}

    # -- forward ----------------------------------------------------------------------------------

    def overflow(self) -> Fault | None:
        """The first value with more elements that are not finite than in FP32."""
        for n in self.graph.nodes:
            found, wanted = self._value(n), self.runs.bad_in_full(source_of_value(n).name)
            if found.bad and wanted is not None and found.bad > wanted:
                return self._overflowed(n)
            born = wanted is None and n.name in self.lines and self._is_born_here(n)
            if born and not self._is_intended(n):
                return self._overflowed(n)
        return None

    def _overflowed(self, n: fx.Node) -> Fault:
        source = source_of_value(n)
        amax, low = self.runs.amax(source.name), _dtype(n)
        end = torch.finfo(low).max
        readers = list(_readers(n)) if source is not n else [n]
        pins = [reader.name for reader in readers if reader.name in self.lines]
        name = str(low).removeprefix("torch.")
        if source.name not in self.lines and readers:
            read = f"it reads {source.name}, up to {_text(amax)}"
            reason = f"{read}, in {name}, which ends at {end:g}"
            source = readers[0]
        elif source is not n and readers:
            reason = (
                f"its result, up to {_text(amax)}, doesn't fit {name}, which ends at {end:g}: "
                f"{readers[0].name} reads it in {name}"
            )
        elif amax > end or isinf(amax):
            reason = f"its result, up to {_text(amax)}, doesn't fit {name}, which ends at {end:g}"
        elif flushed := self._flushed_operand(n):
            reason = (
                f"it reads zeros, where {flushed.name} underflowed in {_name(flushed)}: the "
                f"smallest value there is {self._smallest(flushed)}"
            )
            pins = [flushed.name, *pins]
        else:
            reason = f"a sum or product inside of it leaves the range of {name}"
        return self._fault(Kind.OVERFLOW, source, reason, amax, [*pins, *self._too_large()])

    def own(self) -> Fault | None:
        """The first value that FP32 makes infinite or NaN as well, if that does harm."""
        results = pytree.tree_leaves(self.graph.output_node().args)
        hit = any(isinstance(r, fx.Node) and self._value(r).bad for r in results)
        hit |= any(step.passed_on.bad for step in self.runs.low.steps)
        if not hit:
            return None
        for of_nans in (True, False):
            for n in self.graph.nodes:
                born = n.name in self.lines and self._is_born_here(n, nans=of_nans)
                if born and not self._is_intended(n):
                    return self._fault(Kind.OWN, source_of_value(n), self._why_own(n))
        return None

    def _why_own(self, n: fx.Node) -> str:
        word = "NaN" if self._value(n).nans else "infinite"
        read = [self._value(operand) for operand in n.all_input_nodes]
        text = f"it makes {word} of finite values, and does so in FP32"
        if any(numbers.bad for numbers in read):
            text = f"it makes {word} of infinite values, and does so in FP32"
            if "softmax" in ir.op_name(n):
                text += ": a row is masked out completely"
        return text + "; the precision has no part in it"

    def _is_born_here(self, n: fx.Node, *, nans: bool = False) -> bool:
        found = self._value(n)
        read = [self._value(operand) for operand in n.all_input_nodes]
        if nans:
            return bool(found.nans) and not any(numbers.nans for numbers in read)
        return bool(found.bad) and not any(numbers.bad for numbers in read)

    def _is_intended(self, n: fx.Node) -> bool:
        """Whether the program itself writes inf or nan there: a mask, a constant."""
        numbers = [x for x in pytree.tree_leaves((n.args, n.kwargs)) if isinstance(x, float)]
        return any(isinf(x) or isnan(x) for x in numbers) or ir.is_constant(n)

    def _flushed_operand(self, n: fx.Node) -> fx.Node | None:
        """An operand with more zeros than in FP32, stored in a low dtype on its way."""
        for operand in n.all_input_nodes:
            source = source_of_value(operand)
            full = self.runs.full.values.get(source.name) if self.runs.full else None
            if full is not None and self._value(operand).zeros > full.zeros:
                return source
        return None

    def _smallest(self, source: fx.Node) -> str:
        record = self.runs.exact or self.runs.full
        return _text(record.values[source.name].amin) if record else "not known"

    def _too_large(self) -> Iterator[str]:
        """The operators in a low dtype whose values come near the end of its range in FP32."""
        if self.runs.full is None:
            return
        for n in self.graph.nodes:
            line = self.lines.get(n.name)
            if line is None or line.is_added:
                continue
            low = [x for x in (n, *n.all_input_nodes) if _dtype(x) in HALF]
            sources = [source_of_value(x).name for x in low]
            end = NEAR * torch.finfo(_dtype(low[0])).max if low else 0.0
            if any(end < self.runs.amax(name) < float("inf") for name in sources):
                yield n.name

    # -- backward ---------------------------------------------------------------------------------

    def backward(self) -> Fault | None:
        """The first step of the backward that made of finite gradients some that are not."""
        own = {s.node for s in self._full_steps() if _overflows(s)}
        for step in self.runs.low.steps:
            if not _overflows(step):
                continue
            n = self.nodes[step.node]
            value = source_of_value(n)
            if step.node in own or value.name in own:
                return self._in_source(
                    self._fault(
                        Kind.OWN, n, f"its backward ({step.name}) makes gradients that are not "
                        "finite, and does so in FP32; the precision has no part in it",
                    ), step,
                )  # fmt: skip
            return self._in_source(self._overflowed_back(n, step), step)
        return None

    def _overflowed_back(self, n: fx.Node, step: BackwardStep) -> Fault:
        value = source_of_value(n)
        amax = self.runs.gradient_amax(value.name)
        if value is n:  # the backward of an operator of the program
            reason = f"its backward ({step.name}) makes gradients that are not finite"
            return self._fault(Kind.BACKWARD, n, reason, amax, [n.name, *self._too_steep()])
        reader = self._who_passed(n) or value
        name = _name(value)
        what = f"up to {_text(amax)} without the loss scale, " if amax < float("inf") else ""
        reason = f"the gradient that it passes to {value.name}, {what}doesn't fit {name}"
        return self._fault(Kind.BACKWARD, reader, reason, amax, [value.name, *self._too_steep()])

    def _who_passed(self, n: fx.Node) -> fx.Node | None:
        """The operator of the program whose backward made the largest gradient of this value."""
        sizes = {
            reader: max(
                (s.passed_on.amax for s in self.runs.low.steps if s.node == reader.name),
                default=0.0,
            )
            for reader in _readers(n)
            if reader.name in self.lines
        }
        return max(sizes, key=lambda reader: sizes[reader], default=None)

    def _too_steep(self) -> Iterator[str]:
        """The values in a low dtype whose gradients don't fit it without any loss scale."""
        for n in self.graph.nodes:
            line = self.lines.get(n.name)
            if line is None or line.is_added or _dtype(n) not in HALF:
                continue
            end = NEAR * torch.finfo(_dtype(n)).max
            if end < self.runs.gradient_amax(n.name) < float("inf"):
                yield n.name

    def underflow(self) -> Iterator[Fault]:
        """The first gradient, in the order of the backward, that is lost."""
        low = self.runs.low
        for n in reversed(list(self.graph.nodes)):
            lost = low.lost.get(n.name, 0.0)
            if lost < LOST or low.gradient_errors.get(n.name, 0.0) < LOST:
                continue
            value = source_of_value(n)
            reader = self._who_passed(n) or value
            amax = self.runs.gradient_amax(value.name)
            reason = (
                f"{lost:.0%} of the gradient that it passes to {value.name}, up to {_text(amax)} "
                f"without the loss scale, become zero in {_name(n)}"
            )
            pins = [reader.name, value.name]
            yield self._fault(Kind.UNDERFLOW, reader, reason, amax, pins)
            return

    def _full_steps(self) -> Iterable[BackwardStep]:
        return self.runs.full.steps if self.runs.full is not None else ()

    def _in_source(self, fault: Fault, step: BackwardStep) -> Fault:
        """The fault at the line inside of a user's backward, where it is known."""
        if not step.frames:
            return fault
        line = step.frames[-1].partition(" in ")[0]
        return replace(fault, node=replace(fault.node, source=line, frames=step.frames))

    # -- accuracy ---------------------------------------------------------------------------------

    def inaccurate(self) -> Iterator[Fault]:
        """The values that are far off, though what they were computed from is not."""
        errors = self.runs.low.errors
        for n in self.graph.nodes:
            error, line = errors.get(n.name, 0.0), self.lines.get(n.name)
            if line is None or error < INACCURATE:
                continue
            if ir.is_cast(n) and 10 * errors.get(n.all_input_nodes[0].name, 0.0) < error:
                yield self._rounded_away(n, error)
            if line.is_added:
                continue
            read = max((errors.get(operand.name, 0.0) for operand in n.all_input_nodes), default=0)
            full = self.runs.full.errors.get(n.name, 0.0) if self.runs.full else 0.0
            if 10 * max(read, full) > error:
                continue
            rounded = [source_of_value(x).name for x in n.all_input_nodes if self._was_rounded(x)]
            reason = (
                f"its result is off by {error:.0%}, what it reads by {read:.2%}, and in FP32 it is "
                f"off by {full:.2%}: it makes much of little differences"
            )
            pins = [name for name in (*rounded, n.name) if name in self.lines]
            yield self._fault(Kind.INACCURATE, n, reason, self.runs.amax(n.name), pins)

    def _rounded_away(self, n: fx.Node, error: float) -> Fault:
        """Of a cast: the values are too small for the dtype that a reader wants."""
        value = source_of_value(n)
        readers = [reader for reader in _readers(n) if reader.name in self.lines]
        amax, name = self.runs.amax(value.name), _name(n)
        reason = f"its result, up to {_text(amax)}, is off by {error:.0%} once rounded to {name}"
        if readers:
            reason += f", in which {readers[0].name} reads it"
        line = value if value.name in self.lines or not readers else readers[0]
        return self._fault(Kind.INACCURATE, line, reason, amax, [r.name for r in readers])

    def _was_rounded(self, operand: fx.Node) -> bool:
        """Whether the value went through a low dtype on its way."""
        n = operand
        while ir.role(n) in ir.ADDED and n.all_input_nodes and _dtype(n) not in HALF:
            n = n.all_input_nodes[0]
        return _dtype(n) in HALF

    # -- shared -----------------------------------------------------------------------------------

    def _value(self, n: fx.Node) -> Numbers:
        while ir.is_getitem(n):
            n = n.all_input_nodes[0]
        return self.runs.low.values.get(n.name, Numbers())

    def _fault(
        self, kind: Kind, n: fx.Node, reason: str, amax: float = float("inf"),
        pins: Iterable[str] = (),
    ) -> Fault:  # fmt: skip
        line = self.lines.get(n.name) or PlanNode(
            n.name, ir.op_name(n), ir.module_path(n), ir.source(n), "", "", "", "", "",
            frames=ir.frames(n),
        )  # fmt: skip
        return Fault(kind, line, reason, amax, tuple(dict.fromkeys(pins)))


def _overflows(step: BackwardStep) -> bool:
    return bool(step.passed_on.bad) and not step.received.bad


def _readers(n: fx.Node) -> Iterator[fx.Node]:
    """The operators of the program that read this value, through casts and scaling of ours."""
    for user in n.users:
        if ir.role(user) in ir.ADDED:
            yield from _readers(user)
        elif user.op != "output":
            yield user


def _dtype(n: fx.Node) -> torch.dtype:
    """The dtype of the node's first floating-point result; FP32 if it has none."""
    found = [t.dtype for t in ir.tensors_of(n.meta.get("val")) if t.is_floating_point()]
    return found[0] if found else torch.float32


def _name(n: fx.Node) -> str:
    low = _dtype(n)
    if low not in HALF:  # stored in FP32, but rounded on its way to a reader
        low = next((_dtype(user) for user in n.users if _dtype(user) in HALF), low)
    return str(low).removeprefix("torch.")


def _text(number: float) -> str:
    return "an unknown size" if isinf(number) else f"{number:.3g}"
