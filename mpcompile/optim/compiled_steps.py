"""The compiled steps of one optimizer: which of them the next step is, and when one is compiled.

    exact    over the parameters that have a gradient: the first patterns of gradients
    wide     over all that may get one, where patterns keep changing (layers that are dropped,
             experts without tokens): those without one are left as they are (`absent.py`)
    none     many were compiled, and none fits: the step runs operator by operator

A setting that changes compiles the same step anew, and counts as none of these.
"""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from .. import logs
from ..errors import CannotRewrite, MPCompileWarning
from ..scaling import parameters
from ..scaling.loss_scale import LossScale
from ..torch_inside.dynamo import compile_session
from ..torch_inside.modes import modes_off
from .absent import Absent
from .compile_piece import Emit
from .fingerprint import Fingerprint
from .first_state import initialise_state, state_stands_by
from .inputs import Member, Setting, all_members_of
from .key import StepKey
from .reports import Results
from .separable import ParametersMix
from .shadow import StateAppeared
from .step import CompiledStep

# So many patterns of gradients have a program of their own: two losses in turn, say.
_EXACT = 2
# For so many patterns (or dtypes, or loss scales) programs are compiled.
_MOST = 16


@dataclass
class LastKey:
    """The key of the last step, what it was made from, and what was compiled for it, once that is
    known: to look a key up takes a hash of it all.
    """

    key: StepKey
    rests_on: Fingerprint
    step: CompiledStep | None = None


class CompiledSteps:
    """The compiled steps of one optimizer; `compilations`: how many times one was compiled."""

    def __init__(
        self, max_grad_norm: float | None, results: Results, emit: Emit, dump: Path | None
    ) -> None:
        self._new = functools.partial(
            CompiledStep, max_grad_norm=max_grad_norm, results=results, emit=emit, dump=dump
        )
        self.compilations = 0
        self._varying: set[Setting] = set()
        self._said: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Compile anew what is needed: the state is another one."""
        self._exact: dict[StepKey, CompiledStep] = {}
        self._wide: list[CompiledStep] = []
        self._patterns = 0  # for how many something was compiled
        self._apart = True  # whether the parameters are updated each for itself, as far as is known

    @property
    def all(self) -> list[CompiledStep]:
        """Those that there are."""
        return [*self._exact.values(), *self._wide]

    def find(self, key: StepKey, part: Optimizer) -> CompiledStep | None:
        """The step that was compiled for this key, or for more than that."""
        exact = self._exact.get(key)
        if exact is not None:
            return exact
        return next((step for step in self._wide if step.covers(key, part)), None)

    def compiled(
        self,
        key: StepKey,
        known: CompiledStep | None,
        part: Optimizer,
        whole: Optimizer,
        own: LossScale,
    ) -> CompiledStep | None:
        """Compile a step for a key.

        Args:
            known: the one that was compiled for it and doesn't hold any more, or None.
            part, whole: the optimizer; of ZeRO, `part` has this rank's param groups alone.
            own: the loss scale of parameters of no scaled model.

        Returns:
            None if there are too many: after a warning, the step is to run operator by operator.

        Raises:
            StateAppeared: the first step makes state, so that it can't be traced.
            CannotRewrite: it can't be traced at all.
        """
        start, why = time.perf_counter(), _why(part, known, self.all)
        if known is not None:  # a setting that changed may change again: an input now
            self._varying |= known.rests_on.constants.changed(part)
        elif self._patterns >= _MOST:
            self._warn_of_too_many(part)
            return None
        with compile_session(), modes_off():  # tracing uses its own FakeTensors
            wide = known.is_wide if known is not None else self._patterns >= _EXACT
            step = self._compiled_wide(key, part, whole, own) if wide and self._apart else None
            if step is not None:
                self._wide = [s for s in self._wide if s is not known] + [step]
            else:
                step = self._exact[key] = self._compiled_exact(key, part)
        self._patterns += known is None
        self.compilations += 1
        logs.event(
            "optim", logging.INFO, "compiled",
            "a step of %(optimizer)s over %(parameters)d parameters was compiled in %(seconds).2f "
            "s: %(why)s", optimizer=type(part).__name__, parameters=len(step.key.members), why=why,
            seconds=time.perf_counter() - start,
        )  # fmt: skip
        return step

    def _compiled_exact(self, key: StepKey, part: Optimizer) -> CompiledStep:
        initialise_state(part, key.members)
        return self._with_settings(lambda varying: self._new(part, key, varying=varying))

    def _compiled_wide(
        self, key: StepKey, part: Optimizer, whole: Optimizer, own: LossScale
    ) -> CompiledStep | None:
        """A step over all parameters that may get a gradient; None if there is no such step."""
        everyone = all_members_of(whole, sharded=key.connected is not None)
        members = [m for m in everyone if _is_scaled_alike(m, key)]
        with state_stands_by(part, members) as waiting:
            try:
                return self._new_wide(members, waiting, key, part, own)
            except StateAppeared:
                # Not all state can be made before a step: then none can wait for a first gradient.
                members = [m for m in members if m.param not in waiting]
                return self._new_wide(members, {}, key, part, own)
            except ParametersMix:
                self._apart = False
                return None

    def _new_wide(
        self,
        members: Sequence[Member],
        waiting: Mapping[torch.Tensor, dict[str, Any]],
        key: StepKey,
        part: Optimizer,
        own: LossScale,
    ) -> CompiledStep:
        wide = StepKey.of(members, own, key.connected, usual=key.scales)
        absent = Absent(wide, {p: state for p, state in waiting.items() if state})
        return self._with_settings(
            lambda varying: self._new(part, wide, varying=varying, absent=absent)
        )

    def _with_settings(
        self, compiled: Callable[[frozenset[Setting]], CompiledStep]
    ) -> CompiledStep:
        if self._varying:
            # A step may use a number in a way that no graph input allows; then it is a constant.
            try:
                return compiled(frozenset(self._varying))
            except (StateAppeared, ParametersMix):
                raise
            except CannotRewrite as error:
                names = ", ".join(sorted({key for _, key in self._varying}))
                self._warn_once(
                    "settings",
                    f"MPOptimizer: {names} changed between steps and can't be an input of the "
                    f"compiled step ({error}): each new value compiles it anew. Keep it constant "
                    "(OneCycleLR: cycle_momentum=False)",
                )
        return compiled(frozenset())

    def _warn_of_too_many(self, part: Optimizer) -> None:
        name = type(part).__name__
        why = (
            "no program covers them all"
            if self._apart
            else f"what {name} does to a parameter depends on which others have one"
        )
        self._warn_once(
            "patterns",
            "MPOptimizer: which parameters have a gradient, or how it is stored, changes from step "
            f"to step, and {why}. {self._patterns} programs were compiled; a step that none of "
            f"them fits runs operator by operator from now on, as {name} itself does it, and waits "
            "for the device",
        )

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._said:
            self._said.add(about)
            warnings.warn(message, MPCompileWarning, stacklevel=2)


def _is_scaled_alike(member: Member, key: StepKey) -> bool:
    """Whether a member's gradient depends on no other loss scale than those of the key do."""
    known = parameters.scales_of(member.param)
    return member.param.grad is not None or all(any(s is k for k in key.scales) for s in known)


# -- what is logged --------------------------------------------------------------------------------


def _why(optimizer: Optimizer, step: CompiledStep | None, others: Collection[CompiledStep]) -> str:
    """Why a step is to be compiled, though there was `step` for its key, or `others`."""
    if step is not None:
        return step.rests_on.broken_by(optimizer) or "its state is stored in another way"
    if others:
        return "gradients, parameters or loss scales for which none was compiled yet"
    return "none was compiled yet, or a state was loaded"


def log_by_operator(optimizer: Optimizer, key: StepKey) -> None:
    logs.event(
        "optim", logging.INFO, "by_operator",
        "a step of %(optimizer)s over %(parameters)d parameters runs operator by operator, because "
        "it makes the optimizer's state; the next one is compiled",
        optimizer=type(optimizer).__name__, parameters=len(key.members),
    )  # fmt: skip
