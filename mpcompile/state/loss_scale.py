"""Loss scaling: the state, its pure update, and the count of the backward passes that overflowed.

FP16 gradients below 2**-24 vanish. Multiplying the gradient where it enters the graph, and dividing
where it leaves, moves it into range ("Mixed Precision Training", Micikevicius et al., ICLR 2018,
section 3.2). The dynamic scale follows NVIDIA's mixed-precision guide: start large, double after
2000 good steps, halve and skip the step on overflow. The multiplication itself lives in the graph
(`passes/scale_gradients.py`), the start value is found in the first backward (`fit.py`), and who
may take a step is decided in `guard.py`.

    backward                      overflows += a gradient that left the graph was not finite
    an optimizer's step           skipped if `overflows` grew since this optimizer looked last
    once per training forward     scale = update(scale, overflow)

The count is never reset, so no look hides an overflow from the next optimizer.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import MPCompileError, MPCompileWarning
from .later import Later

log = logging.getLogger("mpcompile")

# GradScaler's; the largest that a fitted scale starts with, too.
INIT_SCALE = 2.0**16
# A sum over a batch of large errors may fit at a scale below 1 only.
MIN_SCALE = 2.0**-14
MOST_FAILURES = 3  # of the search for the first scale


@dataclass(frozen=True)
class ScaleState:
    """Everything that changes while training. `scale` multiplies the gradient."""

    scale: float
    good_steps: int = 0
    overflows_left: int = 1
    skipped_steps: int = 0


_FIELDS = tuple(field.name for field in dataclasses.fields(ScaleState))
_SETTINGS = (
    "growth_factor", "backoff_factor", "growth_interval", "hysteresis", "min_scale", "max_scale",
)  # fmt: skip


@dataclass(frozen=True)
class Count:
    """How far the backward passes of a scale's graphs had come at some moment.

    Attributes:
        passes: how many times there was something to collect; known without asking the device.
        overflows: how many of those had a gradient that was not finite: 0-d int64 on the device,
            or None before the first.
    """

    passes: int = 0
    overflows: torch.Tensor | None = None

    def since(self, earlier: Count) -> torch.Tensor | None:
        """How many overflowed after `earlier`: 0-d int64, or None where no backward ran."""
        if self.passes == earlier.passes or self.overflows is None:
            return None
        return self.overflows if earlier.overflows is None else self.overflows - earlier.overflows


class LossScale:
    """How gradients are scaled in FP16, and the live value.

    Build one with `LossScale.dynamic()`, `.grad_scaler()`, `.static(128.0)` or `.none()` and give
    it to `mpcompile(..., loss_scale=...)`; each compiled model has its own.

    Attributes:
        kind: "dynamic", "static" or "none".
        value: the current scale.
        skipped_steps: optimizer steps skipped because of an overflow.
        fitting: whether the value is still to be found, in the first backward.
        moves: grows whenever the value may have changed: between equal `moves` it is one number.
        open: whether some graph hands gradients on to what stands before it, other than a leaf.
    """

    def __init__(
        self,
        kind: str,
        init_scale: float | None,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = MIN_SCALE,
        max_scale: float = 2.0**24,
    ) -> None:
        self.fitting = init_scale is None
        start = min(max(INIT_SCALE, min_scale), max_scale) if init_scale is None else init_scale
        checks = {
            f"init_scale={init_scale}: must be positive and finite": 0 < start < float("inf"),
            f"growth_factor={growth_factor}: must be above 1": growth_factor > 1,
            f"backoff_factor={backoff_factor}: must be between 0 and 1": 0 < backoff_factor < 1,
            f"growth_interval={growth_interval}: must be a whole number from 1": _counts(
                growth_interval
            ),
            f"hysteresis={hysteresis}: must be a whole number from 1": _counts(hysteresis),
            f"min_scale={min_scale}, max_scale={max_scale}: need 0 < min <= init <= max": kind
            != "dynamic"
            or 0 < min_scale <= start <= max_scale,
        }
        for complaint, fine in checks.items():
            if not fine:
                raise MPCompileError(f"LossScale.{kind}({complaint})")
        self.kind = kind
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self.min_scale = min_scale
        self.max_scale = max_scale
        self.open = False
        self.fp16_only = False  # made by default, not handed over: BF16 does without
        self._state = ScaleState(float(start), overflows_left=hysteresis)
        self._warned = self._logged = False
        self._start()

    def _start(self) -> None:
        """What no pickle keeps."""
        self.moves = 0
        self._forwards = 0  # training forwards seen; the scale moves once for each
        self._moved_at = 0
        self._overflow_at = -1  # the forward for which an overflow has been counted
        self._failures = 0
        self._fitted: int | None = None  # the backward that has found the value, by its number
        self.restored = False  # whether it was given its state
        self.loaded = False  # and no forward has used it yet
        self.searched = False  # whether the first backward of some graph looks for the value
        self._optimized = False  # whether some optimizer looks at it
        self.lookers: weakref.WeakSet[Any] = weakref.WeakSet()  # which ones
        self._leaves = WeakIdKeyDictionary()  # the parameters whose gradients it scales
        self._tensors: dict[torch.device, tuple[float, torch.Tensor]] = {}
        self._in_vain = WeakIdKeyDictionary()  # what the forwards of failed searches multiplied by
        self._found: dict[torch.device, torch.Tensor] = {}
        self._resident: dict[str, torch.Tensor] = {}  # the state, once a generated step moves it
        self._count = Count()
        self._looked = Count()  # where the last look was, anybody's
        self._by_hand = Count()  # and that of `overflowed`
        self._void = Count()  # whatever overflowed until then left no gradient behind
        self._arriving: list[tuple[Later, bool]] = []  # overflows, were gradients held then
        self._early = False  # it has moved for an overflow whose step is still to come
        self.used: torch.Tensor | None = None  # what the last training forward multiplied by

    @classmethod
    def dynamic(
        cls,
        init_scale: float | None = None,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = MIN_SCALE,
        max_scale: float = 2.0**24,
    ) -> LossScale:
        """x`growth_factor` after `growth_interval` good steps in a row, x`backoff_factor` after
        `hysteresis` overflows; never outside [min_scale, max_scale].

        Without `init_scale` the first backward finds it: the largest power of two up to 2**16 that
        leaves room for gradients eight times as large. So no first steps are skipped.

        Raises:
            MPCompileError: a factor, interval or bound that makes no sense.
        """
        return cls(
            "dynamic",
            init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
        )

    @classmethod
    def grad_scaler(cls) -> LossScale:
        """As `torch.amp.GradScaler` does by default: start at 2**16, skip steps until it fits."""
        return cls.dynamic(INIT_SCALE)

    @classmethod
    def default(cls) -> LossScale:
        """What `loss_scale="dynamic"` means: the dynamic scale in FP16, none in BF16."""
        scale = cls.dynamic()
        scale.fp16_only = True
        return scale

    @classmethod
    def static(cls, scale: float = 128.0) -> LossScale:
        """A constant scale; an overflowed step is still skipped."""
        return cls("static", scale)

    @classmethod
    def none(cls) -> LossScale:
        """No scaling and no skipping."""
        return cls("none", 1.0)

    @property
    def state(self) -> ScaleState:
        """The live numbers. Where a generated step keeps them on a GPU, this waits for it."""
        if not self._resident:
            return self._state
        return ScaleState(**{f: self._resident[f].item() for f in _FIELDS})  # type: ignore[arg-type]

    @state.setter
    def state(self, state: ScaleState) -> None:
        self._keep(state)
        self.fitting = False
        for name in self._resident.keys() - set(_FIELDS):
            self._resident[name].fill_(False)

    @property
    def value(self) -> float:
        return self.state.scale

    @property
    def skipped_steps(self) -> int:
        return self.state.skipped_steps

    @property
    def active(self) -> bool:
        return self.kind != "none"

    def __repr__(self) -> str:
        state = self.state
        counts = f"good_steps={state.good_steps}, skipped_steps={state.skipped_steps}"
        return f"LossScale.{self.kind}(value={state.scale:g}, {counts})"

    def __getstate__(self) -> dict[str, Any]:
        kept = ("kind", *_SETTINGS, "open", "fp16_only", "fitting", "_warned", "_logged")
        return {**{name: getattr(self, name) for name in kept}, "_state": self.state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def update(self, state: ScaleState, overflow: bool) -> ScaleState:
        """The state after a step. Pure: no argument is changed."""
        skipped = state.skipped_steps + overflow
        if self.kind != "dynamic":
            return dataclasses.replace(state, skipped_steps=skipped)
        scale, good, left = state.scale, state.good_steps + 1, state.overflows_left
        if overflow:
            good, left = 0, left - 1
            if left <= 0:
                scale, left = max(scale * self.backoff_factor, self.min_scale), self.hysteresis
        elif good >= self.growth_interval:
            scale, good, left = min(scale * self.growth_factor, self.max_scale), 0, self.hysteresis
        return ScaleState(scale, good, left, skipped)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: the settings, the live state, and whether the start is yet to be found."""
        return {
            "kind": self.kind,
            **{name: getattr(self, name) for name in _SETTINGS},
            **dataclasses.asdict(self.state),
            "fitting": self.fitting,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of ours, or a `torch.amp.GradScaler`'s.

        Raises:
            MPCompileError: the mapping is neither.
        """
        if set(_FIELDS) <= state.keys():
            self.kind = state["kind"]
            live = ScaleState(**{name: state[name] for name in _FIELDS})
        elif {"scale", "_growth_tracker"} <= state.keys():
            live = ScaleState(float(state["scale"]), int(state["_growth_tracker"]), self.hysteresis)
        else:
            raise MPCompileError(
                f"LossScale.load_state_dict: keys {sorted(state)} are neither a LossScale's nor a "
                "torch.amp.GradScaler's"
            )
        for name in _SETTINGS:
            if name in state:
                setattr(self, name, state[name])
        self.state = live
        self.restored = self.loaded = True
        self.fitting = bool(state.get("fitting", False))

    # -- what the compiled graphs use -------------------------------------------------------------

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The graph's two extra inputs: the scale, and the leaf whose "gradient" counts overflows.

        Both 0-d FP32 on `device`. A new value is a new tensor: a backward that is still to come
        divides by the scale its forward multiplied with.
        """
        if self._resident and not (self.fitting and self.searched):
            self.used = self._resident["scale"].clone()
        else:  # one tensor for all forwards of the iteration that finds the value
            held = self._tensors.get(device)
            if held is None or held[0] != self.value:
                held = (self.value, torch.tensor(self.value, dtype=torch.float32, device=device))
                self._tensors[device] = held
            self.used = held[1]
        if device not in self._found:
            self._found[device] = torch.zeros(
                (), dtype=torch.float32, device=device, requires_grad=True
            )
        return self.used, self._found[device]

    def fit(self, value: float) -> None:
        """The first backward has found the value. The next step or forward ends the search;
        until then other graphs of this backward may still lower it.
        """
        self._tensors.clear()  # the one of this iteration is written in place
        self._state = dataclasses.replace(self._state, scale=value)
        if self._resident:
            self._resident["scale"].fill_(value)
        self._fitted = _backward_running()

    @property
    def fitted(self) -> bool:
        """Whether a backward of this iteration has found the value."""
        return self._fitted is not None

    def _end_of_search(self) -> None:
        if self._fitted is not None:
            self.fitting, self._fitted = False, None

    def search_failed(self, used: torch.Tensor, *, hopeless: bool) -> None:
        """A backward overflowed at every scale, so its gradients are multiplied by what its forward
        used; the next forward uses another tensor, which a search may write to. One such batch may
        be an accident; after a few training starts as GradScaler does.

        Args:
            hopeless: values that are not finite: that is no failure of the search.
        """
        self._in_vain[used] = True
        self._tensors.clear()
        self.moves += 1
        self._failures += not hopeless
        if self._failures == MOST_FAILURES:
            self.fitting = False

    def searched_in_vain(self, used: torch.Tensor) -> bool:
        """Whether a search has failed for a forward that used this tensor."""
        return used in self._in_vain

    def saw_forward(self) -> None:
        """A training forward is about to run.

        Raises:
            MPCompileError: gradients that overflowed were used in an update written by hand.
        """
        self._forwards += 1
        self.loaded = False
        running = _backward_running()
        if self._fitted != running:
            self._end_of_search()
        if running != -1:  # a checkpoint's: nothing can be told from gradients that are half made
            return
        passes = self.count().passes
        if self._arriving or passes != self._looked.passes:
            self._nobody_looked()
        elif len(self.lookers) > 1 and passes != self._void.passes and not self._accumulating():
            self._void = self._count  # one of them may have looked too early, in the backward

    # -- the count of overflows -------------------------------------------------------------------

    def count(self) -> Count:
        """How far the backward passes have come."""
        flags = [leaf.grad for leaf in self._found.values() if leaf.grad is not None]
        if flags:
            total = self._count.overflows
            for leaf in self._found.values():
                leaf.grad = None
            for flag in flags:
                one = flag > 0
                total = one.to(torch.int64) if total is None else total + one.to(total.device)
            self._count = Count(self._count.passes + 1, total)
        return self._count

    def saw(self, gradients: Sequence[torch.Tensor]) -> None:
        """Count an overflow in gradients that left a graph multiplied by the scale."""
        for leaf in self._found.values():
            flag = any_nonfinite(gradients).to(leaf.device, leaf.dtype)
            leaf.grad = flag if leaf.grad is None else leaf.grad + flag

    def void(self) -> Count:
        """Until where overflows don't matter to the leaves: their gradients were thrown away."""
        return self._void

    def scales(self, leaves: Iterable[torch.Tensor]) -> None:
        """Note the leaves whose gradients come out of its graphs."""
        for leaf in leaves:
            self._leaves[leaf] = True

    def _nobody_looked(self) -> None:
        """A backward ran, and no optimizer's step looked at it before the next forward.

        Either gradients are being accumulated; or they were thrown away, and must not cost the next
        step; or an update was written by hand, or made by an optimizer of what stands before these
        graphs. In all but the first case the scale moves here.
        """
        count, accumulating = self.count(), self._accumulating()
        if (new := count.since(self._looked)) is not None:
            self._arriving.append((Later(new), accumulating))
        self._looked = count
        if not accumulating:
            self._void = count
        while self._arriving and (overflows := self._arriving[0][0].read()) is not None:
            _, held = self._arriving.pop(0)
            if overflows:
                self._check_leaves()
            # A good one counts as a step only where no optimizer does the counting.
            if (overflows and (self.open or not held)) or not (self._optimized or held):
                self._early |= bool(overflows) and held
                skipped = self.skipped_steps
                state = self.update(self.state, bool(overflows))
                self._keep(dataclasses.replace(state, skipped_steps=skipped))

    def _accumulating(self) -> bool:
        return any(leaf.grad is not None for leaf in self._leaves)

    def _check_leaves(self) -> None:
        """After an overflow that nobody looked at: are the parameters what they were?"""
        for leaf in self._leaves:
            held = leaf.untyped_storage().size() > 0  # FSDP frees a parameter between its uses
            if held and not bool(leaf.isfinite().all()):
                raise MPCompileError(
                    f"a parameter of shape {tuple(leaf.shape)} is not finite: gradients that "
                    "overflowed went into an update that no optimizer made. Put such an update "
                    "under `if not loss_scale_of(model).overflowed():`"
                )

    def overflowed(self, gradients: Sequence[torch.Tensor] | None = None) -> bool:
        """For an update written by hand: whether it must be left out. Call it once for each.

            if not loss_scale_of(model).overflowed():
                with torch.no_grad():
                    for p in model.parameters():
                        p -= lr * p.grad

        It moves the scale and counts the skipped step, as an optimizer's step does.

        Args:
            gradients: those that will be used; by default the `.grad` of the model's parameters.
        """
        if gradients is None:
            gradients = [leaf.grad for leaf in self._leaves if leaf.grad is not None]
        count = self.count()
        new = count.since(max(self._by_hand, self._void, key=lambda c: c.passes))
        self._by_hand = count
        overflow = bool(any_nonfinite(gradients)) or (new is not None and bool(new))
        self.settle(overflow)
        return overflow

    # -- how it moves -----------------------------------------------------------------------------

    def settle(self, overflow: bool) -> None:
        """Conclude an optimizer step. The scale moves once for each forward; an overflow that shows
        after a good step of another optimizer still lowers it.
        """
        self._end_of_search()
        self._looked, self._optimized = self.count(), True
        first = self._moved_at != self._forwards
        hit = self._overflow_at == self._forwards
        if self._resident and not first:  # a generated step may have counted one
            hit = hit or bool(self._resident["hit"])
        late = overflow and not hit
        self._moved_at = self._forwards
        before = self.state
        if overflow:
            self._overflow_at = self._forwards
            self.say_skipped()
        if overflow and self._early:
            first = late = self._early = False
        if first or late:
            self._keep(self.update(before, overflow))
            if overflow and self.kind == "dynamic" and before.scale <= self.min_scale:
                self.warn_at_floor()
        elif overflow:
            self._keep(dataclasses.replace(before, skipped_steps=before.skipped_steps + 1))
        if self._resident:
            self._resident["hit"].fill_(overflow or (hit and not first))

    def _keep(self, state: ScaleState) -> None:
        """Take over a state that follows from the last one."""
        self.moves += bool(self._resident) or state.scale != self._state.scale
        self._state = state
        for name in _FIELDS if self._resident else ():
            self._resident[name].fill_(getattr(state, name))

    def reside(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Keep the state on `device` from now on: 0-d tensors by the fields of `ScaleState`; `hit`,
        whether an overflow was counted for this forward; and `floor`, set once an overflow came at
        the lowest scale. A generated step moves them there.
        """
        if not self._resident:
            kinds = {float: torch.float32, int: torch.int64, bool: torch.bool}
            hit = self._overflow_at == self._forwards  # another optimizer's step may have seen it
            fields = {**dataclasses.asdict(self._state), "hit": hit, "floor": False}
            self._resident = {
                name: torch.tensor(number, dtype=kinds[type(number)], device=device)
                for name, number in fields.items()
            }
        return self._resident

    def resident(self, name: str) -> torch.Tensor | None:
        """One of the tensors of `reside`, once the state resides there."""
        return self._resident.get(name)

    def begin_step(self) -> bool:
        """A generated step is about to look: whether it is the first since the last forward."""
        self._end_of_search()
        self._looked, self._optimized = self.count(), True
        first = self._moved_at != self._forwards
        self._moved_at = self._forwards
        self.moves += self.kind == "dynamic"
        if self._early and self._resident:
            self._resident["hit"].fill_(True)
            first = self._early = False
        return first

    def skip_for(self) -> None:
        """Count a step that was skipped for an overflow in its graphs, by an optimizer that holds
        none of its parameters. How the scale moves is not that optimizer's business.
        """
        before = self.state
        self.say_skipped()
        self._keep(dataclasses.replace(before, skipped_steps=before.skipped_steps + 1))

    def say_skipped(self) -> None:
        """One line at the first skipped step."""
        if not self._logged:
            self._logged = True
            log.warning(
                "an optimizer step was skipped, because gradients overflowed: that is how a loss "
                "scale is found and kept. loss_scale_of(model).skipped_steps counts them"
            )

    def warn_at_floor(self) -> None:
        """Say once that the scale can't get lower and gradients still overflow."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the loss scale is at its floor ({self.min_scale:g}) and gradients still "
                "overflow: the model itself makes inf or nan. Look at the loss and the forward "
                "activations; try dtype=torch.bfloat16, or Policy(modules={...: 'fp32'}) for the "
                "part that overflows.",
                MPCompileWarning,
                stacklevel=2,
            )


def any_nonfinite(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether some element of some gradient is inf or nan: 0-d bool, for DTensors over all ranks.

    Gradients may be dense, sparse or sharded, on one device or several.
    """
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    dense = [g for g in dense if g.numel() > 0]
    if not dense:
        return torch.tensor(False)
    # The largest magnitude over all of them: inf or nan exactly if some element is.
    norm = torch.nn.utils.get_total_norm(dense, norm_type=float("inf"))
    full = getattr(norm, "full_tensor", None)  # a DTensor's: every rank must decide alike
    whole: torch.Tensor = norm if full is None else full()
    return whole.isfinite().logical_not()


def _backward_running() -> int:
    """The number of the backward that runs in this thread, or -1: none.

    As torch.utils.checkpoint asks (read in torch 2.13; the same in 2.11).
    """
    return torch._C._current_graph_task_id()


def _counts(value: Any) -> bool:
    return isinstance(value, int) and value >= 1
