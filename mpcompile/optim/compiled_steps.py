"""The compiled steps of one optimizer: which of them the next step is, and when one is compiled.

    fused      torch's own kernel updates: nothing is traced (`fused.py`)
    apart      a graph for each kind of parameter: whichever have a gradient, those are called
    together   one graph for all: with multi-tensor operators, for the first patterns of gradients;
               or where what is done to a parameter depends on others, for each pattern
    none       many were compiled, and none fits: the step runs operator by operator

A setting that changes compiles the same step again, and counts as none of these.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from dataclasses import replace as with_
from pathlib import Path

from torch.optim import Optimizer

from .. import logs
from ..devices.registry import capabilities
from ..errors import CannotRewrite, warn
from ..torch_inside.dynamo import compile_session
from ..torch_inside.names import modes_off
from . import fused
from .compiled import Emit
from .first_state import initialise_state
from .kinds import ParametersMix
from .members import Setting, StepConfig, StepKey
from .reports import Results
from .rests_on import Fingerprint
from .shadow import StateAppeared
from .step import CompiledStep
from .traced_step import TracedStep
from .updates import Updates, config_of

# So many patterns of gradients have a program of their own: two losses in turn, say.
_EXACT = 2
# For so many patterns (or dtypes, or loss scales) programs are compiled, and so many are kept.
_MOST = 16
FEW = 16  # parameters: one function of more takes the C++ compiler longer than all else


@dataclass
class LastKey:
    """The key of the last step, what it was made from, and what was compiled for it, once that is
    known: to look a key up takes a hash of it all.
    """

    key: StepKey
    rests_on: Fingerprint
    step: CompiledStep | None = None


class CompiledSteps:
    """The compiled steps of one optimizer; `compilations`: how many times one was traced, or bound
    to torch's own kernel.
    """

    def __init__(
        self, max_grad_norm: float | None, results: Results, emit: Emit, dump: Path | None
    ) -> None:
        self._max_grad_norm, self._results = max_grad_norm, results
        self._emit, self._dump = emit, dump
        self.compilations = 0
        self._varying: set[Setting] = set()
        self._said: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Compile again what is needed: the state is another one."""
        self._steps: dict[StepKey, CompiledStep] = {}
        self._kinds: Updates | None = None  # the last that were traced
        self._patterns = 0  # for how many something was traced
        self._mixes = False  # whether what is done to a parameter depends on others

    def compiled(self, last: LastKey, part: Optimizer) -> CompiledStep | None:
        """The compiled step of a key: the one that was compiled for it, if it holds, or a new one.

        Args:
            part: the optimizer; of ZeRO, that with this rank's param groups alone.

        Returns:
            None if the step is to run operator by operator: its first run makes state, so that the
            next one can be traced; or, after a warning, there are too many.

        Raises:
            CannotRewrite: it can't be traced at all.
        """
        key, known = last.key, last.step or self._steps.get(last.key)
        if known is not None and known.rests_on.holds(part):
            return known
        start, why, before = time.perf_counter(), _why(part, known, self._steps), self.compilations
        for old in (known, self._kinds):
            if old is not None:  # a setting that changed may change again: an input now
                self._varying |= old.rests_on.constants.changed(part)
        if self._kinds is not None and not self._kinds.rests_on.holds(part):
            self._kinds = None
        with compile_session(), modes_off():  # tracing uses its own FakeTensors
            initialise_state(part, key.members)
            try:
                traced = self._traced(key, part, again=known is not None)
            except StateAppeared:
                logs.event(
                    "optim", logging.INFO, "by_operator",
                    "a step of %(optimizer)s over %(parameters)d parameters runs operator by "
                    "operator, because it makes the optimizer's state; the next one is compiled",
                    optimizer=type(part).__name__, parameters=len(key.members),
                )  # fmt: skip
                return None
            if traced is None:
                self._warn_of_too_many(part)
                return None
            emit = self._emit
            if self._mixes and not _is_whole(key) and len(key.members) > FEW:
                emit, why = with_(emit, how="eager"), f"{why}; it runs operator by operator"
            step = self._steps[key] = CompiledStep(traced, emit, self._dump)
        while len(self._steps) > _MOST:
            del self._steps[next(iter(self._steps))]
        if self.compilations != before:
            logs.event(
                "optim", logging.INFO, "compiled",
                "a step of %(optimizer)s over %(parameters)d parameters was compiled in "
                "%(seconds).2f s: %(why)s", optimizer=type(part).__name__,
                parameters=len(step.key.members), why=why, seconds=time.perf_counter() - start,
            )  # fmt: skip
        return step

    def by_operator(self, key: StepKey, part: Optimizer) -> CompiledStep:
        """The step of a key as the optimizer's class does it, between the same checks."""
        initialise_state(part, key.members)
        config = config_of(key, self._max_grad_norm)
        traced = TracedStep(part, key, config, None, self._results, by_operator=True)
        return CompiledStep(traced, Emit("eager"))

    def _traced(self, key: StepKey, part: Optimizer, *, again: bool) -> TracedStep | None:
        """The step of this key as graphs; None if too many were traced."""
        config = config_of(key, self._max_grad_norm)
        if self._emit.how == "inductor" and not _is_whole(key) and fused.fits(part, key):
            self.compilations += not self._steps
            return TracedStep(part, key, config, None, self._results)
        if self._kinds is not None and not self._mixes:
            try:
                if self._kinds.of(part, key) is not None:
                    return TracedStep(part, key, config, self._kinds, self._results)
            except ParametersMix:
                self._mixes = True
        if not again and self._patterns >= _MOST:
            return None
        updates = self._updates(key, part, config)
        self._patterns += not again
        self.compilations += 1
        return TracedStep(part, key, config, updates, self._results)

    def _updates(self, key: StepKey, part: Optimizer, config: StepConfig) -> Updates:
        if not (self._mixes or (_is_whole(key) and self._patterns < _EXACT)):
            try:
                self._kinds = self._with_settings(key, part, config, together=False)
            except ParametersMix:
                self._mixes = True
            else:
                return self._kinds
        return self._with_settings(key, part, config, together=True)

    def _with_settings(
        self, key: StepKey, part: Optimizer, config: StepConfig, *, together: bool
    ) -> Updates:
        def traced(varying: frozenset[Setting]) -> Updates:
            known = self._kinds
            before = known if known is not None and known.varying == varying else None
            return Updates(
                part, key, config, together=together, dump=self._dump, varying=varying,
                before=None if together else before,
            )  # fmt: skip

        if self._varying:
            # A step may use a number in a way that no graph input allows; then it is a constant.
            try:
                return traced(frozenset(self._varying))
            except (StateAppeared, ParametersMix):
                raise
            except CannotRewrite as error:
                names = ", ".join(sorted({key for _, key in self._varying}))
                self._warn_once(
                    "settings",
                    f"MPOptimizer: {names} changed between steps and can't be an input of the "
                    f"compiled step ({error}): each new value compiles it again. Keep it constant "
                    "(OneCycleLR: cycle_momentum=False)",
                )
        return traced(frozenset())

    def _warn_of_too_many(self, part: Optimizer) -> None:
        name = type(part).__name__
        why = (
            f"what {name} does to a parameter depends on which others have one"
            if self._mixes
            else "no program covers them all"
        )
        self._warn_once(
            "patterns",
            "MPOptimizer: which parameters have a gradient, or how it is stored, changes from step "
            f"to step, and {why}. A step that fits none of {self._patterns} programs now runs "
            f"operator by operator, as {name} does it, and waits for the device",
        )

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._said:
            self._said.add(about)
            warn(message)


def _is_whole(key: StepKey) -> bool:
    """Whether one graph updates all parameters, for the first patterns of gradients."""
    return capabilities(key.members[0].param.device).multi_tensor


def _why(optimizer: Optimizer, step: CompiledStep | None, others: Collection[StepKey]) -> str:
    """Why a step is to be compiled, though there was `step` for its key, or one for `others`."""
    if step is not None:
        return step.rests_on.broken_by(optimizer) or "its state is stored in another way"
    if others:
        return "gradients, parameters or loss scales for which none was compiled yet"
    return "none was compiled yet, or a state was loaded"
