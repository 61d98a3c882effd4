"""What must hold after each pass of the pipeline. `verify` raises where a pass broke its promise.
`AsPlanned` runs a graph, and refuses to go on where a value has another dtype than the graph says.

These are internal invariants: a failure is a bug of mpcompile, never the user's. The backend then
compiles the graph unchanged and says so, rather than run a graph that may be wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import ir, rules
from ..errors import CannotRewrite
from ..rules.policy import Precision
from . import units

Recorded = Callable[[], units.History]


class SpecError(AssertionError):
    """A pass left the graph in a state that later passes do not accept."""


def _everything_marked(gm: fx.GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method") and not ir.is_marked(node):
            yield f"{node.name} has no precision class"


def _nothing_undecided(gm: fx.GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        if ir.precision(node) is Precision.FOLLOW:
            yield f"{node.name} is still FOLLOW"


def _operands_as_planned(gm: fx.GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        if not ir.is_marked(node) or ir.role(node) in ir.ADDED:
            continue
        low = ir.precision(node) is Precision.LOW
        for position, operand in ir.float_args(node):
            value = ir.tensor(operand)
            if value is None or (low and _may_stay_wide(node, position, operand)):
                continue
            wanted = ir.mark(node).low if low else torch.float32
            if value.dtype is not wanted:
                yield f"{node.name} reads {operand.name} as {value.dtype}, planned {wanted}"


def _may_stay_wide(node: fx.Node, position: int, operand: fx.Node) -> bool:
    if not rules.castable(node.target, position):
        return True
    value = ir.captured(operand)
    return ir.rule(node).promotes and value is not None and value.ndim == 0


def _compared_in_memory(gm: fx.GraphModule) -> Iterator[str]:
    for node, value in ir.compared(gm.graph):
        yield f"{node.name} compares {value.name}, which may not be rounded, with parts of it"


def _outputs_as_captured(gm: fx.GraphModule) -> Iterator[str]:
    wanted = gm.meta.get("mp_output_dtypes", [])
    results = gm.graph.output_node().args[0]
    for i, result in enumerate(results):  # type: ignore[arg-type]
        value = ir.tensor(result) if isinstance(result, fx.Node) else None
        if value is not None and i < len(wanted) and wanted[i] not in (None, value.dtype):
            yield f"output {i} is {value.dtype}, the program returns {wanted[i]}"


def _results_share_as_captured(gm: fx.GraphModule, history: Recorded) -> Iterator[str]:
    """Results that shared memory, with each other or with an input, must still share it."""
    results: list[Any] = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    captured: list[int | None] = gm.meta.get("mp_output_memory", [])
    together: dict[int | None, list[fx.Node]] = {}
    for then, result in zip(captured, results, strict=False):
        if then is not None and isinstance(result, fx.Node) and not ir.copies_for_overlap(result):
            together.setdefault(then, []).append(result)
    theirs: dict[int | None, list[fx.Node]] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        if ir.storage(node) in together and ir.copy_of(node) is None:
            theirs.setdefault(ir.storage(node), []).append(node)
    shared = [(theirs.get(at) or nodes[:1], nodes) for at, nodes in together.items()]
    if not any(set(nodes) - set(owners) for owners, nodes in shared):
        return
    for owners, nodes in shared:
        for node in nodes:
            if not any(history().shares_memory(node, owner) for owner in owners):
                yield f"{node.name} no longer lies in the memory of {owners[0].name}"


def _places_as_captured(gm: fx.GraphModule) -> Iterator[str]:
    """What an operator names by its place in memory must lie where the program had it."""
    for node in gm.graph.nodes:
        operand = node.args[0] if ir.rule(node).by_strides else None
        if operand is None:
            continue
        program = operand
        while ir.role(program) in ir.ADDED and ir.captured(program) is None:
            program = program.all_input_nodes[0]
        now, then = ir.tensor(operand), ir.captured(program)
        if now is None or then is None or not ir.same_places(now, then):
            yield f"{node.name} reads {operand.name} by places in memory, where it lies otherwise"


def _lanes_as_planned(gm: fx.GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        padding = ir.padding(node)
        wanted = padding.result if padding is not None else None
        if wanted is not None and not ir.same_shape(ir.value(node).shape, wanted):
            yield f"{node.name} is {ir.type_text(ir.value(node))}, planned {wanted}"
        if padding is None and ir.role(node) is not ir.Role.PAD:
            for operand in node.all_input_nodes:
                lanes = ir.padding(operand)
                if lanes is not None and lanes.result != lanes.real:
                    yield f"{node.name} reads the lanes of {operand.name}"


def _regions_folded(gm: fx.GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        if ir.regions(node):
            yield f"{node.name} still stands in an inlined checkpoint"


def _tracked_as_captured(gm: fx.GraphModule, history: Recorded) -> Iterator[str]:
    """No path of a gradient is cut: autograd tracks every value that it tracked in the program."""
    inputs = gm.graph.find_nodes(op="placeholder")
    if not torch.is_grad_enabled() or not any(map(ir.requires_grad, inputs)):
        return
    for node, tracked in history().made.items():
        if ir.requires_grad(node) and not tracked and not ir.is_opaque(node):
            yield f"{node.name} has lost its history"


@dataclass(frozen=True)
class Promise:
    """A check, and the passes after which it holds: all from `since` to `until`.

    Attributes:
        costly: the check takes a function as well, of the graph's history. That runs the graph on
            FakeTensors, which takes as long as all passes together: such checks are made once,
            after `until`, and share it.
    """

    check: Callable[..., Iterator[str]]
    since: str
    until: str
    costly: bool = False


PROMISES = (
    # The calls of checkpoints that `outline` inserts have no class; the nodes in their bodies do.
    Promise(_everything_marked, since="classify", until="clean"),
    Promise(_nothing_undecided, since="plan", until="outline"),
    # `outline` moves nodes into bodies, where this check doesn't look.
    Promise(_operands_as_planned, since="place_casts", until="clean"),
    Promise(_outputs_as_captured, since="place_casts", until="outline"),
    Promise(_places_as_captured, since="place_casts", until="clean"),
    Promise(_compared_in_memory, since="keep_compared", until="clean"),
    Promise(_lanes_as_planned, since="place_pads", until="clean"),
    # These three read autograd's history of the flat graph, so they come before `outline`.
    Promise(_results_share_as_captured, since="copy_overlaps", until="clean", costly=True),
    Promise(units.complaints, since="scale_gradients", until="clean", costly=True),
    Promise(_tracked_as_captured, since="functionalize", until="clean", costly=True),
    Promise(_regions_folded, since="outline", until="outline"),
)


def promises_after(stage: str, order: Sequence[str]) -> tuple[Promise, ...]:
    """What to check after the pass `stage`; `order` lists the passes in pipeline order."""
    at = order.index(stage)
    return tuple(
        promise
        for promise in PROMISES
        if order.index(promise.until if promise.costly else promise.since) <= at
        and at <= order.index(promise.until)
    )


def verify(gm: fx.GraphModule, stage: str, order: Sequence[str]) -> None:
    """Check what holds after the pass `stage` of a pipeline of passes named `order`.

    Raises:
        SpecError: the graph is illegal; the error names the pass and the first offending nodes.
    """
    try:
        gm.graph.lint()
    except RuntimeError as error:
        raise SpecError(f"after {stage}: {error}") from error
    history: Recorded = functools.cache(lambda: units.History(gm))
    complaints: list[str] = []
    for promise in promises_after(stage, order):
        complaints += promise.check(gm, history) if promise.costly else promise.check(gm)
    if complaints:
        more = f" (and {len(complaints) - 3} more)" if len(complaints) > 3 else ""
        raise SpecError(f"after {stage}: {'; '.join(complaints[:3])}{more}")


class AsPlanned(fx.Interpreter):
    """Runs a graph node by node.

    Raises:
        CannotRewrite: a node's result has another dtype than its value in the graph. So something
            around the run, as an autocast region, changes what the passes decided.
    """

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        planned = n.meta.get("val")
        if not isinstance(result, torch.Tensor) or not isinstance(planned, torch.Tensor):
            return result
        if result.dtype is not planned.dtype:
            raise CannotRewrite(f"{n.name} is {result.dtype}, was planned as {planned.dtype}")
        return result
