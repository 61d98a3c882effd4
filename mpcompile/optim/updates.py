"""What an optimizer does to its parameters: its own step, traced and rewritten.

Where each parameter is updated as if the others weren't there, there is a graph for each kind of
parameter, called for every one of the kind; else, or with multi-tensor operators, one for all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import fx
from torch.optim import Optimizer

from .. import ir, logs
from ..capture.compile_log import Dump, trace_step
from ..devices.registry import capabilities
from ..ir.dtypes import HALF
from ..ir.step_config import CopyLayout, Slot
from ..ranks.shards import local
from ..scaling.copies import WorkingCopy
from .elementwise import check_state, refuse_mixing
from .kinds import ParametersMix, graph_of_one, kinds_of
from .masters import entries_of, is_low, updated_by
from .members import Member, Setting, StepConfig, StepKey
from .rests_on import OfStep
from .rewrite import rewritten
from .shadow import own_values
from .trace import Trace, trace

_OF_ONE = ("param", "grad", "state", "copy")


@dataclass(frozen=True)
class UpdateGraph:
    """A graph that updates parameters.

    Attributes:
        graph: as `rewrite.py` makes it.
        calls: for which parameters it is called, each time for as many as it updates.
    """

    graph: fx.GraphModule
    calls: Sequence[tuple[int, ...]]


def in_call(slot: Slot, call: tuple[int, ...]) -> Slot:
    """An input of an update in one of its calls."""
    return replace(slot, index=call[slot.index]) if slot.kind in _OF_ONE else slot


class Updates:
    """What an optimizer does to its parameters, traced over those of one key.

    Args:
        dump: directory for each graph, as traced and rewritten, or None.
        varying: settings whose floats are inputs of the graphs.
        together: one graph updates all, by multi-tensor operators where the device has them.
        before: serves for others: these serve for those, too.

    Attributes:
        traces: the step as its class does it; those of `before` first.
        varying: see above.
        rests_on: the settings and attributes of the optimizer that must not change.
        rounds: whether the optimizer computes in a low dtype by itself, as Muon does.

    Raises:
        StateAppeared, CannotRewrite: see `trace`.
        ParametersMix: they need one graph together.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        key: StepKey,
        config: StepConfig,
        *,
        together: bool,
        dump: Path | None,
        varying: frozenset[Setting] = frozenset(),
        before: Updates | None = None,
    ) -> None:
        self._key, self.varying, self._dump = key, varying, dump
        multi_tensor = capabilities(key.members[0].param.device).multi_tensor
        # `_foreach_*` takes no 0-d tensors as numbers.
        self._foreach = together and multi_tensor and not varying
        self._proved = False
        everyone = range(len(key.members))
        start = time.perf_counter()
        if key.connected is not None:
            check_state(key.members, optimizer)
        traced = self._trace_over(optimizer, everyone)
        gm = traced.graph
        if key.connected is not None:
            refuse_mixing(gm.graph, key.members)
        values = map(ir.tensor, gm.graph.nodes)
        self.rounds = any(value.dtype in HALF for value in values if value is not None)
        spent = time.perf_counter() - start
        self._together = self._rewritten(gm, config, everyone, spent) if together else None
        self.traces: Sequence[Trace] = [*before.traces, traced] if before else [traced]
        self._of: dict[object, fx.GraphModule] = dict(before._of) if before else {}
        self._known: dict[object, int] = dict(before._known) if before else {}
        self.rests_on = OfStep(optimizer, (), self.traces)
        if not together:
            self._apart(gm, optimizer, config, spent)

    def _trace_over(self, optimizer: Optimizer, indices: Sequence[int]) -> Trace:
        return trace(
            optimizer,
            [self._key.members[i] for i in indices],
            foreach=self._foreach,
            varying=self.varying,
            strides=[self._key.strides[i] for i in indices],
        )

    def _apart(
        self, gm: fx.GraphModule, optimizer: Optimizer, config: StepConfig, spent: float
    ) -> None:
        members = self._key.members
        self._kinds = kinds_of(gm.graph, len(members))
        of_kind: dict[object, fx.GraphModule] = {}
        for i, kind in enumerate(self._kinds):
            layout = _layout(optimizer, self._key, i)
            if self._known.setdefault(layout, kind) != kind:  # it depends on which it is
                raise ParametersMix
            if layout in self._of or not members[i].updated:
                continue
            like = kind, config.gradients[i].dtype, config.copies[i]
            if like not in of_kind:
                of_kind[like] = self._rewritten(graph_of_one(gm, i), config, (i,), spent)
            self._of[layout] = of_kind[like]

    def _rewritten(
        self, gm: fx.GraphModule, config: StepConfig, members: Sequence[int], spent: float
    ) -> fx.GraphModule:
        """A traced step as it is run; if asked to, both are dumped."""
        start = time.perf_counter()
        update = rewritten(gm, config, members)
        update.graph.lint()
        seconds = time.perf_counter() - start
        if self._dump is not None:
            record = Dump(self._dump, "step")
            record.stage("traced", gm, spent)
            record.stage("rewritten", update, seconds)
        logs.event(
            "passes", logging.DEBUG, "step_pass",
            "%(name)s changed the optimizer's step, in %(seconds).3f s",
            name="rewritten", seconds=seconds, nodes=len(update.graph.nodes),
        )  # fmt: skip
        trace_step(update)
        return update

    def of(self, optimizer: Optimizer, key: StepKey) -> list[UpdateGraph] | None:
        """The updates of a step for this key; None if it must be traced."""
        if self._together is not None:
            everyone = tuple(range(len(key.members)))
            return [UpdateGraph(self._together, [everyone])] if key is self._key else None
        calls: dict[fx.GraphModule, list[tuple[int, ...]]] = {}
        for i, member in enumerate(key.members):
            if not member.updated:
                continue
            graph = self._of.get(_layout(optimizer, key, i))
            if graph is None:
                return None
            calls.setdefault(graph, []).append((i,))
        if key is not self._key and not self._serves_others(optimizer):
            return None
        written = (graph for graph in calls if ir.writes(graph.graph))  # of a frozen one nothing
        return [UpdateGraph(graph, calls[graph]) for graph in written]

    def _serves_others(self, optimizer: Optimizer) -> bool:
        """Whether the same is done to a parameter whichever others take part: a trace over some of
        them tells.
        """
        if not self._proved:
            some = range(0, len(self._kinds), 2)
            if len(some) == len(self._kinds):
                return False
            graph = self._trace_over(optimizer, some).graph.graph
            if kinds_of(graph, len(some)) != [self._kinds[i] for i in some]:
                raise ParametersMix
            self._proved = True
        return True


def _layout(optimizer: Optimizer, key: StepKey, i: int) -> tuple[object, ...]:
    """What a parameter has, as far as its update may depend on it."""
    member = key.members[i]
    copy = copy_layout(member, key.copies[i])
    if not member.updated:
        return member.group, None
    held = local(updated_by(optimizer, member.param))
    state = {
        name: _stored(local(v)) if isinstance(v, torch.Tensor) else repr(v)
        for name, v in entries_of(optimizer, member.param).items()
    }
    grad = key.strides[i], key.gradients[i].dtype, key.is_wide
    marks = tuple(sorted(own_values(member.param).items(), key=repr))
    return member.group, repr(marks), _stored(held), grad, copy, tuple(state.items())


def _stored(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


def config_of(key: StepKey, max_grad_norm: float | None) -> StepConfig:
    """The settings of a step for this key."""
    return StepConfig(
        gradients=key.gradients,
        copies=tuple(map(copy_layout, key.members, key.copies)),
        checked=key.checked,
        scales=tuple(scale.rule for scale in key.scales),
        max_grad_norm=max_grad_norm,
        ranks=key.connected,
    )


def copy_layout(member: Member, copy: WorkingCopy | None) -> CopyLayout | None:
    """How the low copy of a parameter's master lies in memory: its working copy, or the parameter
    itself, if that is stored low; None: it has none.
    """
    if copy is not None:
        return copy.layout
    param = member.param
    return CopyLayout(param.dtype, local(param).stride(), leads=True) if is_low(param) else None
