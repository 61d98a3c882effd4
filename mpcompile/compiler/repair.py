"""`repair=True`: when steps were skipped in a row, pin what overflows to FP32.

The next call of each graph is noted: its inputs, its random numbers, and the gradients that enter
its results. After its step, the rewritten graph and the captured one run on that, node by node:
what fits FP32 and not the low dtype is pinned, and the graph is compiled again.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx

from .. import ir, logs
from ..capture.pipeline import Planned
from ..devices.registry import RandomState
from ..ir.fakes import duplicate
from ..ir.text import places
from ..observe.fault import Fault, FaultKind, GraphRuns
from ..observe.find_fault import find
from ..observe.record import Record
from ..observe.watch import Observer
from ..scaling import guard
from ..scaling.loss_scale import LossScale
from ..torch_inside.names import reset_code

# What is not finite. What comes later follows from what comes before.
_SERIOUS = (FaultKind.OVERFLOW, FaultKind.OWN, FaultKind.BACKWARD)


def repair(scale: LossScale) -> bool:
    """Pin the first node that overflows in the calls that were noted, and what overflows with it.
    Returns whether it did.
    """
    if guard.decide_alike() or scale.repairs.used_up:
        return False
    at = scale.value
    if scale.rule.dynamic:  # what fits at a lower scale, the scale finds by itself
        at = min(at, max(1.0, scale.min_scale))
    found = [(fault, call.graph) for call in scale.in_a_row.calls if (fault := call.fault(at))]
    if not found:
        return False
    fault, graph = min(found, key=lambda one: _SERIOUS.index(one[0].kind))
    known = places(graph.planned.captured.graph)
    full = {line.name for line in graph.planned.plan.nodes if line.precision == "FULL"}
    # A node that a pass made of several has no place.
    pins = {name: known[name] for name in fault.pins if name in known and name not in full}
    code = graph.code() if graph.code is not None else None
    if code is None or scale.repairs.pins.keys() >= set(pins.values()):
        return False
    event = f"{_named(fault)}; pinned to FP32: {', '.join(pins)}"
    scale.repairs.add(event, {place: _reason(fault, name) for name, place in pins.items()})
    logs.event(
        "repair", logging.WARNING, "repaired", "after %(skipped)d skipped steps: %(fault)s",
        skipped=scale.in_a_row.skipped, fault=event, pins=list(pins),
    )  # fmt: skip
    if not scale.fitting:  # it was not the scale's fault
        before = scale.in_a_row.before
        scale.live.set(
            dataclasses.replace(
                scale.state, scale=before, good_steps=0, overflows_left=scale.hysteresis
            )
        )
    reset_code(code)
    return True


def _named(fault: Fault) -> str:
    """`block.3.fc2 (model.py:12), linear_7 = aten::linear: its result, up to ...`."""
    node = fault.node
    where = (node.module or "the model itself") + (f" ({node.source})" if node.source else "")
    return f"{where}, {node.name} = {node.op}: {fault.reason}"


def _reason(fault: Fault, name: str) -> str:
    """Why a node is pinned, for the plan."""
    if name == fault.node.name:
        return f"pinned by repair=True: {fault.reason}"
    return f"pinned by repair=True, together with {fault.node.name}: {fault.reason}"


class Repairable:
    """One scaled graph that may be repaired.

    Args:
        planned: the graph, its plan, and the copies of it that are run node by node.
        code: the user's code that Dynamo made it of, which is traced again for a repair; None if
            that isn't known.
    """

    def __init__(self, planned: Planned, code: CodeType | None) -> None:
        self.planned = planned
        # What Dynamo keeps of the graph hangs on the code.
        self.code = weakref.ref(code) if code is not None else None
        graph = planned.captured.graph
        targets = [target for n in graph.nodes if ir.is_op(n) for target in ir.written(n)]
        memory = {ir.storage(target) for target in targets} - {None}
        inputs = enumerate(graph.find_nodes(op="placeholder"))
        self.written = [i for i, n in inputs if ir.storage(n) in memory]


class NotedCall:
    """One call of a graph that is about to run, to be run again when its step is over. Tell it of
    the results.

    Args:
        given: all inputs of the rewritten graph; the caller's come first.
    """

    def __init__(self, graph: Repairable, given: Sequence[Any]) -> None:
        self.graph = graph
        values, self._scale, _ = graph.planned.inputs.scaling_apart(given)
        self._inputs = [duplicate(x) if i in graph.written else x for i, x in enumerate(values)]
        self._random = RandomState(x.device for x in values if isinstance(x, torch.Tensor))
        self._received: dict[int, torch.Tensor] = {}  # by the number of the result

    def gave(self, results: Sequence[Any]) -> None:
        """Note the gradients that will enter these results of the call."""
        tensors = [(i, x) for i, x in enumerate(results) if isinstance(x, torch.Tensor)]
        first = {id(x): (i, x) for i, x in reversed(tensors)}  # one may be returned twice
        for i, result in first.values():
            if result.requires_grad and result.grad_fn is not None:
                result.register_hook(functools.partial(self._entered, i))

    # Where a whole training step is compiled, Dynamo would trace what runs in its backward.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _entered(self, number: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # else it is autograd's zero
            known, new = self._received.get(number), gradient.detach()
            self._received[number] = new if known is None else known + new

    def fault(self, at: float) -> Fault | None:
        """The first node that makes something that isn't finite at this loss scale."""
        tensors = [x for x in self._inputs if isinstance(x, torch.Tensor)]
        if any(x.numel() and not x.untyped_storage().size() for x in tensors):
            return None  # FSDP frees a parameter between uses
        planned = self.graph.planned
        captured = len(planned.captured.graph.find_nodes(op="placeholder"))
        try:
            scaling = torch.full_like(self._scale, at), torch.zeros_like(self._scale)
            low = self._run(planned.rewritten, len(self._inputs), scaling)
            full = self._run(planned.captured, captured)
            found = find(GraphRuns(planned.rewritten.graph, planned.plan, low, full, scale=at))
        except Exception as error:  # of ours, or no memory, in the middle of someone's training
            text = "a call can't be run node by node, so nothing is repaired: %(error)s"
            why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            logs.event("repair", logging.WARNING, "unread", text, error=why)
            return None
        return next((fault for fault in found if fault.kind in _SERIOUS), None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run(self, gm: fx.GraphModule, inputs: int, scaling: Sequence[torch.Tensor] = ()) -> Record:
        """Forward and backward of a graph, on leaves of its own: no gradient and no hook of the
        caller's is touched.
        """
        record = Record()
        given = [
            x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
            for x in self._inputs[:inputs]
        ]
        for i in self.graph.written:
            given[i] = duplicate(given[i])
        for found in scaling[1:]:
            found.requires_grad_()
        with self._random.again(), torch.enable_grad():
            results = Observer(gm, record).run(*given, *scaling)
            into = [(results[i], grad) for i, grad in self._received.items()]
            into = [(x, grad.to(x.dtype)) for x, grad in into if x.requires_grad]
            if into:
                torch.autograd.backward([x for x, _ in into], [grad for _, grad in into])
        return record
