"""Loss scaling: what a user configures, reads and saves.

FP16 gradients below 2**-24 vanish. Multiplying the gradient where it enters the graph, and dividing
where it leaves, moves it into range ("Mixed Precision Training", Micikevicius et al., ICLR 2018,
section 3.2).

    backward                      overflows += whether a gradient that left the graph was not finite
    an optimizer's step           skipped if `overflows` grew since this optimizer last looked
    once per training forward     the scale moves, by the rule

A `LossScale` joins the rule (`ir/scale.py`), the current values (`live_scale.py`), the count of
overflows (`overflows.py`) and the search for the start (`scale_search.py`). The multiplication
itself is in the graph (`passes/graph/scale_gradients.py`); `guard.py` tells who may take a step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..ir.scale import INIT_SCALE, Ruled, ScaleRule, ScaleState, rule_of
from ..planner.target import Repairs
from ..torch_inside.distributed import active_ddp
from ..torch_inside.names import running_backward
from .live_scale import LiveScale, Stepped
from .messages import Messages
from .overflows import Overflows
from .scale_search import Search
from .skipped_steps import SkippedInARow

_SETTINGS = tuple(field.name for field in dataclasses.fields(ScaleRule))


class LossScale(Ruled):
    """How gradients are scaled in FP16, and the current scale.

    Build one with `LossScale.dynamic()`, `.grad_scaler()`, `.static(128.0)` or `.none()` and
    pass it to `mpcompile(..., loss_scale=...)`; each compiled model has its own.

    Args:
        rule: the kind, and the constants of a dynamic one.
        init_scale: the first scale, or None: the first backward finds it, where it can run again.

    Attributes:
        kind: "dynamic", "static" or "none".
        value: the current scale.
        skipped_steps: optimizer steps skipped because of an overflow.

    Raises:
        MPCompileError: a factor, interval or bound that makes no sense.
    """

    def __init__(self, rule: ScaleRule | None = None, init_scale: float | None = None) -> None:
        rule = rule_of(rule)
        fitting = init_scale is None
        start = min(max(INIT_SCALE, rule.min_scale), rule.max_scale) if fitting else init_scale
        assert start is not None
        rule.check(init_scale, start)
        self.open = False  # whether a graph passes gradients on to non-leaf inputs: other networks
        self.fp16_only = False  # of an option, no LossScale of the user's: BF16 does without it
        self._start(ScaleState(float(start), overflows_left=rule.hysteresis), rule, fitting=fitting)

    def _start(self, state: ScaleState, rule: ScaleRule, *, fitting: bool) -> None:
        self.live = LiveScale(state, rule)
        self.search = Search(self.live, fitting=fitting)
        self.overflows = Overflows()
        self.said = Messages()
        self.in_a_row = SkippedInARow(self.live, self.said)
        self.repairs = Repairs()
        self.restored = self.loaded = False  # its state was loaded; no forward has used that yet
        self.agreed = not fitting  # all ranks have the same scale: given, or since agreed on
        self.used: torch.Tensor | None = None  # the last training forward's, 0-d FP32, where it ran
        self._optimized = False  # whether some optimizer's step checks it

    @classmethod
    def dynamic(
        cls,
        init_scale: float | None = None,
        growth_factor: float = ScaleRule.growth_factor,
        backoff_factor: float = ScaleRule.backoff_factor,
        growth_interval: int = ScaleRule.growth_interval,
        hysteresis: int = ScaleRule.hysteresis,
        min_scale: float = ScaleRule.min_scale,
        max_scale: float = ScaleRule.max_scale,
    ) -> LossScale:
        """x`growth_factor` after `growth_interval` good steps in a row, x`backoff_factor` after
        `hysteresis` overflows; never outside [min_scale, max_scale].

        Without `init_scale` the first backward finds the start: the largest power of two up to
        2**16 that leaves room for gradients eight times as large. If it overflows, it runs again at
        half the scale. With `init_scale` it does not, nor does a CUDA graph, which starts at 2**16.

        Raises:
            MPCompileError: a factor, interval or bound that makes no sense.
        """
        rule = ScaleRule(
            "dynamic", growth_factor, backoff_factor, growth_interval, hysteresis, min_scale,
            max_scale,
        )  # fmt: skip
        return cls(rule, init_scale)

    @classmethod
    def grad_scaler(cls) -> LossScale:
        """As `torch.amp.GradScaler` by default: start at 2**16 and skip steps until it fits."""
        return cls.dynamic(INIT_SCALE)

    @classmethod
    def default(cls) -> LossScale:
        """The meaning of `loss_scale="dynamic"`: the dynamic scale in FP16, none in BF16."""
        scale = cls.dynamic()
        scale.fp16_only = True
        return scale

    @classmethod
    def static(cls, scale: float = 128.0) -> LossScale:
        """A constant scale; an overflowed step is still skipped."""
        return cls(ScaleRule("static"), scale)

    @classmethod
    def none(cls) -> LossScale:
        """No scaling and no skipping."""
        return cls(ScaleRule("none"), 1.0)

    # -- the current values -----------------------------------------------------------------------

    @property
    def rule(self) -> ScaleRule:
        return self.live.rule

    @rule.setter
    def rule(self, rule: ScaleRule) -> None:
        self.live.rule = rule

    @property
    def state(self) -> ScaleState:
        """The current values. Where a generated step keeps them on a GPU, this waits for it."""
        return self.live.state

    @state.setter
    def state(self, state: ScaleState) -> None:
        self.live.set(state)
        self.search.fitting = False

    @property
    def value(self) -> float:
        return self.live.scale

    @property
    def skipped_steps(self) -> int:
        return self.state.skipped_steps

    @property
    def fitting(self) -> bool:
        return self.search.fitting

    @property
    def active(self) -> bool:
        return self.kind != "none"

    @property
    def yields(self) -> bool:
        """Whether an MPOptimizer's own takes its place: the user gave no number and no object."""
        return self.fp16_only and self.kind != "static"

    def __repr__(self) -> str:
        state = self.state
        counts = f"good_steps={state.good_steps}, skipped_steps={state.skipped_steps}"
        return f"LossScale.{self.kind}(value={state.scale:g}, {counts})"

    # -- pickles and checkpoints ------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        kept = (*_SETTINGS, "open", "fp16_only", "fitting")
        said = {"_warned": self.said.floor, "_logged": self.said.skips}  # as in version 0.3
        state = ScaleState(**self.state.saved())
        return {**{name: getattr(self, name) for name in kept}, **said, "_state": state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = dict(state)
        rule = ScaleRule(**{name: kept.pop(name) for name in _SETTINGS})
        self._start(kept.pop("_state"), rule, fitting=kept.pop("fitting"))
        self.said.floor, self.said.skips = kept.pop("_warned"), kept.pop("_logged")
        self.__dict__.update(kept)

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the settings, the current state, and whether the start is still unknown."""
        return {**dataclasses.asdict(self.rule), **self.state.saved(), "fitting": self.fitting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of a LossScale, or of a `torch.amp.GradScaler`.

        Raises:
            MPCompileError: the mapping is neither.
        """
        live = ScaleState.loaded(state, self.hysteresis)
        self.rule = dataclasses.replace(self.rule, **{n: state[n] for n in _SETTINGS if n in state})
        self.state = live
        self.restored = self.loaded = True
        self.search.fitting = bool(state.get("fitting", False))
        self.agreed = False
        for reduction in self.overflows.reductions:
            reduction.settled = False

    # -- several ranks ----------------------------------------------------------------------------

    @property
    def start(self) -> float:
        """The scale that this rank would go on with, or inf while its search has found none."""
        return math.inf if self.search.goes_on else self.value

    def take_start(self, value: float) -> None:
        """Go on with the least start of all ranks; with one's own search if that is inf."""
        if self.agreed or value == math.inf:
            return
        self.agreed = True
        self.search.end()
        if value != self.value:
            self.live.start_at(value)

    # -- what the compiled graphs use -------------------------------------------------------------

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The graph's two extra inputs: the scale, and the leaf whose "gradient" counts overflows.

        Both are 0-d FP32 on `device`. While the start is searched, each call of a graph has a scale
        of its own, into which its backward writes the number that its gradients came out with.
        """
        self.used = None  # so that its memory can be used again
        self.used = self.live.tensor(device, own=self.fitting)
        return self.used, self.overflows.leaf(device)

    def saw_forward(self) -> None:
        """A training forward is about to run. If a backward overflowed and no step checked it, the
        scale moves here, unless its gradients are still accumulating.

        Raises:
            MPCompileError: gradients that overflowed were used in an update written by hand.
        """
        if self.overflows.reductions and active_ddp() is None:
            return  # one rank's own forward, beside those that all ranks run
        self.live.forwards += 1
        self.loaded = False
        running = running_backward()
        self.search.end_if_found(but_in=running)
        if running != -1:  # a checkpoint's forward: gradients are only half made
            return
        for overflow, held in self.overflows.before_forward():
            # A good backward counts as a step only if no optimizer counts steps.
            if (overflow and (self.open or not held)) or not (self._optimized or held):
                self.live.move_without_step(overflow, step_will_come=held)

    # -- what optimizer steps use -----------------------------------------------------------------

    def overflowed(self, gradients: Sequence[torch.Tensor] | None = None) -> bool:
        """For a handwritten update: whether it must be skipped. Call this once for each update.

            if not loss_scale_of(model).overflowed():
                with torch.no_grad():
                    for p in model.parameters():
                        p -= lr * p.grad

        Like an optimizer's step, it moves the scale and counts the skipped step.

        Args:
            gradients: the gradients to be used; default: the `.grad` of the model's parameters.
        """
        for reduction in sorted(self.overflows.reductions, key=lambda r: r.number):
            if not reduction.settled:
                reduction.settle()
        if (ranks := self.overflows.ranks) and not self.agreed:
            self.take_start(ranks.least([self.start])[0])
        overflow = self.overflows.before_update_by_hand(gradients)
        self.settle(overflow)
        return overflow

    def _step_looks(self) -> None:
        if not self.search.goes_on:  # found, or no graph can search
            self.search.end()
        self.overflows.looked()
        self._optimized = True

    def settle(self, overflow: bool) -> None:
        """Conclude an optimizer step. The scale moves once for each forward. An overflow that shows
        in an optimizer's step, after a good step of another optimizer, still lowers it.
        """
        self._step_looks()
        self._saw(self.live.settle(overflow))

    def stepped(self) -> None:
        """A generated step has run; whether it was skipped is learnt when that has arrived."""
        self._saw(self.live.stepped())

    def _saw(self, known: Stepped | None) -> None:
        if known is not None:
            if known.skipped and not self.overflows.began:  # an MPOptimizer's own, as one in BF16
                self.said.not_finite(
                    "no graph has a scale, so look at the data, the targets and the loss; steps "
                    "with such gradients are skipped"
                )
            self.said.step(known.skipped > 0)
        self.in_a_row.stepped(known)
        if known is not None and known.at_floor:
            self.said.at_floor(self.min_scale)

    def begin_step(self) -> bool:
        """Prepare for a generated step; returns whether it is the first since the last forward."""
        self._step_looks()
        return self.live.begin_step()

    def skip_for(self) -> None:
        """Count a step skipped by an optimizer of none of these parameters; nothing moves."""
        self.said.step(skipped=True)
        self.live.count_skipped()
