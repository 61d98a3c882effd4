"""The calls of a compiled training step: is it still right, what does it take, what has it done.

Dynamo's guards have looked at the caller's inputs and at the model. Here is checked what they don't
see: the optimizers' groups, settings and state, and what was noted of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..optim.members import Setting
from ..scaling import parameters
from ..scaling.stays_finite import FiniteCheck
from ..torch_inside.tensors import hooks_on
from .one_graph import Traced
from .program import StepProgram
from .update import Update


class Outdated(Exception):
    """Something has changed: the training step must be traced again. Nothing has run.

    Attributes:
        varying: optimizer -> its settings that have changed, and may change again.
    """

    def __init__(self, varying: Mapping[Any, frozenset[Setting]] | None = None) -> None:
        super().__init__()
        self.varying = dict(varying or {})


class NotThisTime(Exception):
    """This one step must run in pieces; the message says why. Nothing has run."""


class Call:
    """A compiled training step, as Dynamo calls it.

    Args:
        run: the function of the graph.
        trained: the caller's inputs that are parameters, with their numbers.
        begins: called when the step begins to run.
    """

    def __init__(
        self,
        program: StepProgram,
        traced: Traced,
        run: Callable[[list[Any]], Sequence[Any]],
        trained: Sequence[tuple[int, torch.Tensor]],
        begins: Callable[[], None],
    ) -> None:
        self._run, self._traced, self._begins = run, traced, begins
        self._trained = [(i, p, parameters.state_of(p)) for i, p in trained]
        self._changes = parameters.changes()
        self._program, self._held = program, program.held.tensors
        self._updates = program.updates
        self._reads = [read for forward in program.forwards for read in forward.reads]
        scales = dict.fromkeys(f.scale for f in program.forwards if f.scale is not None)
        self._scales = [(scale, len(scale.repairs.events)) for scale in scales]
        # A loss scale speaks itself.
        self._watch = None if scales else FiniteCheck("training step", [p for _, p in trained])

    def __call__(self, *given: Any) -> list[Any]:
        """Do the step, and return what Dynamo's graph returns.

        Raises:
            Outdated, NotThisTime: before anything was done.
        """
        self._check(given)
        self._begins()
        for read in self._reads:
            read.copy.refresh(read.master)
        for made in self._program.made:
            if isinstance(made, Update):
                made.prepare(self._held)
            elif made.scale is not None:
                made.scale.saw_forward()
        with torch.no_grad():
            returned = self._run([*given, *self._held])
        late = iter(returned[self._traced.late :])
        for update in self._updates:
            if update.is_late:
                update.take(late, self._held)
            update.done()
        if written := self._program.written:  # after `done`: its copy is not up to date
            torch.autograd.graph.increment_version([given[i] for i in written])
        for scale, found in zip(self._traced.unseen, late, strict=True):
            scale.overflows.saw_count(found)
        results = [returned[r] if isinstance(r, int) else r[0] for r in self._traced.results]
        if self._watch is not None and self._watch.comes():
            skipped = [update.skipped() for update in self._updates]
            self._watch.see_call(results, [p for _, p, _ in self._trained], skipped)
        return results

    def _check(self, given: Sequence[Any]) -> None:
        known = self._changes == parameters.changes()
        for i, param, state in self._trained:
            if given[i] is not param or not (known or parameters.state_of(param) is state):
                raise Outdated
            if any(hooks_on(param)):
                raise NotThisTime("a parameter has a hook that reads its gradient")
            grad = param.grad
            if grad is not None and grad.dtype is not param.dtype:
                raise NotThisTime("a gradient is stored in low precision")
        self._changes = parameters.changes()
        if not all(update.rests_on.holds(update.inner) for update in self._updates):
            raise Outdated({u.optimizer: u.constants.changed(u.inner) for u in self._updates})
        if any(scale.fitting for scale, _ in self._scales):
            raise NotThisTime("the first backward finds the start of its loss scale")
        for scale, repairs in self._scales:
            if scale.in_a_row.pending and self._program.can_be_noted:
                raise NotThisTime("steps were skipped in a row, and this one is noted")
            if len(scale.repairs.events) != repairs:
                raise Outdated
