"""A call of a scaled graph, run node by node in place of the compiled one.

The results go to the caller as usual, so that the caller's own loss and backward complete the
record. If something in it was not finite, the captured graph runs once in FP32 after the step
(`in_fp32.py`): that shows which values and gradients don't fit the low dtype. Checkpoints are not
folded back here, so this one step stores what they would not.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch

from .. import ir, logs
from ..devices.generators import RandomState
from ..ir.fakes import duplicate
from ..ir.places import Place, places
from ..observe.fault import Fault, Kind, Runs
from ..observe.faults import find
from ..observe.record import Record
from ..observe.watch import Watch
from ..pipeline import Planned
from ..scaling.trouble import Trouble
from ..torch_inside.autograd import running_backward
from .in_fp32 import InFP32

__all__ = ["Look", "Watched"]

_SERIOUS = (Kind.OVERFLOW, Kind.OWN, Kind.BACKWARD)  # makes values or gradients that aren't finite


class Look:
    """What one watched call recorded, once its backward has run.

    Args:
        graph: the graph that was called.
        again: the call in FP32.
        scale: the loss scale that the call multiplied by: 0-d.
    """

    def __init__(self, graph: Watched, again: InFP32, scale: torch.Tensor) -> None:
        self.graph, self.again, self.scale = graph, again, scale
        self.low = Record()

    def fault(self) -> Fault | None:
        """The first node that made something that isn't finite."""
        made = (*self.low.values.values(), *(step.passed_on for step in self.low.steps))
        if not any(numbers.bad for numbers in made):
            return None
        try:
            runs = Runs(self.low, self.again.run(), scale=float(self.scale))
            found = find(self.graph.rewritten.graph, self.graph.plan, runs)
        except Exception as error:  # of ours, in the middle of somebody's training
            text = "what a watched step recorded can't be read: %(error)s"
            logs.event("repair", logging.WARNING, "unread", text, error=_text(error))
            return None
        if runs.full is None:  # then nobody knows what FP32 does
            found = [fault for fault in found if fault.kind is not Kind.OWN]
        return next((fault for fault in found if fault.kind in _SERIOUS), None)


class Watched:
    """One scaled graph that can be watched.

    Args:
        planned: the graph, its plan, and the copies of it that are run node by node.
        code: the user's code that Dynamo made it of, which is traced anew for a repair; None if
            that isn't known.
        repair: whether the user asked for repairs.
    """

    def __init__(self, planned: Planned, code: CodeType | None, *, repair: bool) -> None:
        self.captured, self.rewritten = planned.captured, planned.rewritten
        self.plan, self.repair = planned.plan, repair
        # What Dynamo keeps of the graph hangs on the code.
        self._code = weakref.ref(code) if code is not None else None
        graph = self.captured.graph
        targets = [target for n in graph.nodes if ir.is_op(n) for target in ir.written(n)]
        memory = {ir.storage(target) for target in targets} - {None}
        inputs = enumerate(graph.find_nodes(op="placeholder"))
        self._inputs = planned.inputs
        self._written = [i for i, n in inputs if ir.storage(n) in memory]

    @property
    def code(self) -> CodeType | None:
        """The user's code, if it is known, and there still is it."""
        return self._code() if self._code is not None else None

    def run(
        self, compiled: Callable[..., Any], inputs: Sequence[Any], given: Sequence[Any],
        trouble: Trouble,
    ) -> Any:  # fmt: skip
        """The results of a call. Where the graph can't be run node by node, the compiled one runs,
        and nothing is watched any more.

        Args:
            compiled: the compiled graph.
            inputs: all inputs of it.
            given: the caller's inputs, which the captured graph takes.
            trouble: takes the look.
        """
        random = RandomState({x.device for x in given if isinstance(x, torch.Tensor)})
        before = self._copies(inputs)
        try:
            look = self._look(inputs, given, before, random)
            results = Watch(self.rewritten, look.low).run(*inputs)
            look.again.watch(results)
        except Exception as error:  # whatever it is, it isn't the user's: training goes on
            if running_backward() != -1:
                raise  # torch.utils.checkpoint ends a second forward by an exception
            why = _text(error)
        else:
            trouble.looks.append(look)
            return results
        # Outside of `except`: the error holds what the failed run has made, which may be out of
        # memory.
        text = "a graph can't be run node by node, so no step is watched: %(error)s"
        logs.event("repair", logging.WARNING, "unwatched", text, error=why)
        trouble.give_up()
        random.restore()
        with torch.no_grad():
            for i in self._written:
                if not torch.equal(inputs[i], before[i]):
                    inputs[i].copy_(before[i])
        return compiled(*inputs)

    def places(self, pins: Sequence[str]) -> dict[str, Place]:
        """The places of these nodes, by name; without those that a pass made of several."""
        known = places(self.captured.graph)
        return {name: known[name] for name in pins if name in known}

    def _look(
        self, inputs: Sequence[Any], given: Sequence[Any], before: Sequence[Any],
        random: RandomState,
    ) -> Look:  # fmt: skip
        tracked = [isinstance(x, torch.Tensor) and x.requires_grad for x in given]
        kept = [before[i] if i in self._written else x for i, x in enumerate(given)]
        _, scale, _ = self._inputs.scaling_apart(inputs)
        return Look(self, InFP32(self.captured, kept, tracked, random), scale)

    @torch.no_grad()
    def _copies(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs, with copies of those that the graph may write to."""
        found = list(inputs)
        for i in self._written:
            found[i] = duplicate(inputs[i])
        return found


def _text(error: Exception) -> str:
    """An error in one line; torch.fx adds a dump of the graph."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"
