"""A call of a scaled graph, run node by node in place of the compiled one.

The results go to the caller as usual, so that the caller's own loss and backward complete the
record. If something in it was not finite, the captured graph runs once in FP32 after the step: that
shows which values and gradients don't fit the low dtype. Checkpoints are not folded back here, so
this one step stores what they would not.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch

from .. import ir, logs
from ..devices.generators import RandomState, unchanged
from ..ir.fakes import duplicate
from ..ir.places import Place, places
from ..observe.fault import Fault, Kind, Runs
from ..observe.find_fault import find
from ..observe.record import Record
from ..observe.watch import Watch, passed
from ..pipeline import Planned
from ..scaling.not_finite import Seen
from ..scaling.skips_in_a_row import Trouble
from ..torch_inside.autograd import running_backward

__all__ = ["Look", "Watched"]

_SERIOUS = (Kind.OVERFLOW, Kind.OWN, Kind.BACKWARD)  # makes values or gradients that aren't finite


class Look:
    """What one watched call recorded, once its backward has run; and the call once more, in FP32,
    forward and backward.

    That runs when the step that was skipped is over: the parameters have not changed, and the
    call's own activations are gone. It takes the inputs and random numbers of the call, and the
    gradients that entered its results.

    Args:
        graph: the graph that was called.
        given: the caller's inputs.
        kept: these, with copies of those that the call writes to.
        random: the random state before the call.
        scale: the loss scale that the call multiplied by: 0-d.
    """

    def __init__(
        self,
        graph: Watched,
        given: Sequence[Any],
        kept: Sequence[Any],
        random: RandomState,
        scale: torch.Tensor,
    ) -> None:
        self.graph, self.scale, self.low = graph, scale, Record()
        self._random = random
        # Leaves of its own: no gradient and no hook of the caller's is touched.
        self.inputs = [
            y.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
            for x, y in zip(given, kept, strict=True)
        ]
        self._received: dict[int, torch.Tensor] = {}  # by the number of the result
        self._results: list[torch.Tensor] = []

    def seen(self) -> Seen:
        """What was not finite of the call."""
        names = [n.name for n in self.graph.captured.graph.find_nodes(op="placeholder")]
        return Seen.of(names, self.inputs, self._results, [*self._received.values()])

    def watch(self, results: Sequence[Any]) -> None:
        """Note the gradients that will enter these results of the call."""
        tensors = [(i, x) for i, x in enumerate(results) if isinstance(x, torch.Tensor)]
        self._results = [x.detach() for _, x in tensors]
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

    def fault(self) -> Fault | None:
        """The first node that made something that isn't finite."""
        made = (*self.low.values.values(), *(step.passed_on for step in self.low.steps))
        if not any(numbers.bad for numbers in made):
            return None
        try:
            runs = Runs(self.low, self._in_fp32(), scale=float(self.scale))
            found = find(self.graph.rewritten.graph, self.graph.plan, runs)
        except Exception as error:  # of ours, in the middle of somebody's training
            text = "what a watched step recorded can't be read: %(error)s"
            logs.event("repair", logging.WARNING, "unread", text, error=_text(error))
            return None
        if runs.full is None:  # then nobody knows what FP32 does
            found = [fault for fault in found if fault.kind is not Kind.OWN]
        return next((fault for fault in found if fault.kind in _SERIOUS), None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _in_fp32(self) -> Record | None:
        """What the run in FP32 recorded; the values alone where its backward failed, and None where
        not even the forward was possible.
        """
        record = Record()
        tensors = [x for x in self.inputs if isinstance(x, torch.Tensor)]
        try:
            if any(x.numel() and not x.untyped_storage().size() for x in tensors):
                return None  # FSDP frees a parameter between uses
            with unchanged({x.device for x in tensors}), torch.enable_grad():
                self._random.restore()
                results = Watch(self.graph.captured, record).run(*map(passed, self.inputs))
                into = [(results[i], grad) for i, grad in self._received.items()]
                into = [(x, grad.to(x.dtype)) for x, grad in into if x.requires_grad]
                if into:
                    torch.autograd.backward([x for x, _ in into], [grad for _, grad in into])
        except Exception:  # memory ran out, perhaps; what is known already has its use
            return Record(values=record.values) if record.values else None
        return record


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
            kept = [before[i] if i in self._written else x for i, x in enumerate(given)]
            _, scale, _ = self._inputs.scaling_apart(inputs)
            look = Look(self, given, kept, random, scale)
            results = Watch(self.rewritten, look.low).run(*inputs)
            look.watch(results)
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

    @torch.no_grad()
    def _copies(self, inputs: Sequence[Any]) -> list[Any]:
        found = list(inputs)
        for i in self._written:
            found[i] = duplicate(inputs[i])
        return found


def _text(error: Exception) -> str:
    """An error in one line; torch.fx adds a dump of the graph."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"
