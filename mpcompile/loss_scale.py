"""Loss scaling: the state, its pure update, and the hook that skips an overflowed optimizer step.

FP16 gradients below 2**-24 vanish. Multiplying the gradient where it enters the graph, and dividing
where it leaves, moves it into range ("Mixed Precision Training", Micikevicius et al., ICLR 2018,
section 3.2). The dynamic scale follows NVIDIA's mixed-precision guide: start large, double after
2000 good steps, halve and skip the step on overflow. The multiplication itself lives in the graph
(`passes/scale_gradients.py`); here is the rest:

    before each optimizer.step():
        overflow = the graphs' own flag, or a gradient of this optimizer that is not finite
        if overflow: hide the gradients, so that the step changes nothing; show them again after
        once per training forward: scale = update(scale, overflow)
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from .errors import MPCompileError, MPCompileWarning


@dataclass(frozen=True)
class ScaleState:
    """Everything that changes while training. `scale` multiplies the gradient."""

    scale: float
    good_steps: int = 0
    overflows_left: int = 1
    skipped_steps: int = 0


_FIELDS = tuple(field.name for field in dataclasses.fields(ScaleState))


class LossScale:
    """How gradients are scaled in FP16, and the live value.

    Build one with `LossScale.dynamic()`, `.static(128.0)` or `.none()` and give it to
    `mpcompile(..., loss_scale=...)`; each compiled model has its own.

    Attributes:
        kind: "dynamic", "static" or "none".
        value: the current scale.
        skipped_steps: optimizer steps skipped because of an overflow.
    """

    def __init__(
        self,
        kind: str,
        init_scale: float,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
    ) -> None:
        checks = {
            f"init_scale={init_scale}: must be positive and finite": 0 < init_scale < float("inf"),
            f"growth_factor={growth_factor}: must be above 1": growth_factor > 1,
            f"backoff_factor={backoff_factor}: must be between 0 and 1": 0 < backoff_factor < 1,
            f"growth_interval={growth_interval}: must be a whole number from 1": _counts(
                growth_interval
            ),
            f"hysteresis={hysteresis}: must be a whole number from 1": _counts(hysteresis),
            f"min_scale={min_scale}, max_scale={max_scale}: need 0 < min <= init <= max": kind
            != "dynamic"
            or 0 < min_scale <= init_scale <= max_scale,
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
        self._state = ScaleState(float(init_scale), overflows_left=hysteresis)
        self.fp16_only = False  # made by default, not handed over: BF16 does without
        self._forwards = 0  # training forwards seen; the scale moves at most once for each
        self._updated_at = 0
        self._overflow_at = -1
        self._warned = False
        self._tensors: dict[torch.device, tuple[float, torch.Tensor]] = {}
        self._found: dict[torch.device, torch.Tensor] = {}
        self._resident: dict[str, torch.Tensor] = {}  # the state, once a generated step moves it
        self._flag: torch.Tensor | None = None
        self.used: torch.Tensor | None = None  # what the last training forward multiplied by

    @classmethod
    def dynamic(
        cls,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
    ) -> LossScale:
        """Start at `init_scale`; x`growth_factor` after `growth_interval` good steps in a row,
        x`backoff_factor` after `hysteresis` overflows; never outside [min_scale, max_scale].

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
        self._state = state
        for name, tensor in self._resident.items():
            tensor.fill_(getattr(state, name, False))

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
        return f"LossScale.{self.kind}(value={self.value:g}, skipped_steps={self.skipped_steps})"

    def __getstate__(self) -> dict[str, Any]:
        passing: dict[str, Any] = {
            "_tensors": {},
            "_found": {},
            "_resident": {},
            "_flag": None,
            "used": None,
        }
        return {**self.__dict__, "_state": self.state, **passing}

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
        """Plain numbers: the settings and the live state."""
        settings = ("growth_factor", "backoff_factor", "growth_interval", "hysteresis",
                    "min_scale", "max_scale")  # fmt: skip
        return {
            "kind": self.kind,
            **{name: getattr(self, name) for name in settings},
            **dataclasses.asdict(self.state),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of ours, or a `torch.amp.GradScaler`'s.

        Raises:
            MPCompileError: the mapping is neither.
        """
        fields = {f.name for f in dataclasses.fields(ScaleState)}
        if fields <= state.keys():
            self.kind = state["kind"]
            live = ScaleState(**{name: state[name] for name in fields})
        elif {"scale", "_growth_tracker"} <= state.keys():
            live = ScaleState(float(state["scale"]), int(state["_growth_tracker"]), self.hysteresis)
        else:
            raise MPCompileError(
                f"LossScale.load_state_dict: keys {sorted(state)} are neither a LossScale's nor a "
                "torch.amp.GradScaler's"
            )
        for name in ("growth_factor", "backoff_factor", "growth_interval", "hysteresis",
                     "min_scale", "max_scale"):  # fmt: skip
            if name in state:
                setattr(self, name, state[name])
        self.state = live

    # -- what the compiled graphs use -------------------------------------------------------------

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The graph's two extra inputs: the scale, and the leaf whose "gradient" counts overflows.

        Both 0-d FP32 on `device`. A new value is a new tensor: a backward that is still to come
        divides by the scale its forward multiplied with.
        """
        if self._resident:
            self.used = self._resident["scale"].clone()
        else:
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

    def reside(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Keep the state on `device` from now on: 0-d tensors by the fields of `ScaleState`, and
        `floor`, set once an overflow came at the lowest scale. A generated step moves them there.
        """
        if not self._resident:
            kinds = {float: torch.float32, int: torch.int64, bool: torch.bool}
            fields = {**dataclasses.asdict(self._state), "floor": False}
            self._resident = {
                name: torch.tensor(number, dtype=kinds[type(number)], device=device)
                for name, number in fields.items()
            }
        return self._resident

    @property
    def floor(self) -> torch.Tensor | None:
        """0-d bool on the device, once the state resides there: see `reside`."""
        return self._resident.get("floor")

    def begin_step(self, device: torch.device) -> tuple[bool, torch.Tensor]:
        """What a generated step needs to know: whether it is the first since the last training
        forward, and how many overflows the graphs themselves saw since then (0-d, on `device`).
        """
        first = self._updated_at != self._forwards
        self._updated_at = self._forwards
        flags = [f.grad for f in self._found.values() if f.grad is not None]
        for leaf in self._found.values():
            leaf.grad = None
        seen = [] if first or self._flag is None else [self._flag]
        total = [flag.to(device) for flag in (*seen, *flags)]
        self._flag = sum(total[1:], total[0]) if total else _no_overflow(device)
        return first, self._flag

    def saw_forward(self) -> None:
        """A training forward is about to run."""
        self._forwards += 1

    def settle(self, gradients_overflow: bool) -> bool:
        """Conclude an optimizer step: whether to skip it. Moves the scale once per forward."""
        flags = [f.grad for f in self._found.values() if f.grad is not None]
        for leaf in self._found.values():
            leaf.grad = None
        if any(bool(flag) for flag in flags):
            self._overflow_at = self._forwards
        overflow = gradients_overflow or self._overflow_at == self._forwards
        if self._updated_at != self._forwards:
            self._updated_at = self._forwards
            before, self.state = self.state, self.update(self.state, overflow)
            if overflow and self.kind == "dynamic" and before.scale <= self.min_scale:
                self.warn_at_floor()
        elif overflow:
            self.state = dataclasses.replace(self.state, skipped_steps=self.state.skipped_steps + 1)
        return overflow

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


def _no_overflow(device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float32, device=device)


# -- the optimizer hook ---------------------------------------------------------------------------

# optimizers whose step skips by itself
_self_skipping: weakref.WeakSet[Optimizer] = weakref.WeakSet()

_changes = 0

# parameter -> the LossScales of the graphs that read it
_scales_of = WeakIdKeyDictionary()
# called whenever a graph's scale becomes known
_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
_hidden: weakref.WeakKeyDictionary[Optimizer, list[tuple[torch.Tensor, torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)


class Listener(Protocol):
    """Who waits for the scales of its parameters."""

    def scales_appeared(self) -> None: ...


def listen(listener: Listener) -> None:
    """Call `listener.scales_appeared()` after each call of `watch`, as long as it lives."""
    _listeners.add(listener)


def watch(parameters: Iterable[torch.Tensor], scale: LossScale) -> None:
    """Let optimizers that hold these parameters know whose scale their gradients depend on."""
    global _changes
    for parameter in parameters:
        scales = _scales_of.setdefault(parameter, [])
        if not any(known is scale for known in scales):
            scales.append(scale)
            _changes += 1
    for listener in list(_listeners):
        listener.scales_appeared()


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def changes() -> int:
    """Grows whenever some parameter got a scale: what was known of `scales_of` may be outdated."""
    return _changes


def skips_by_itself(optimizer: Optimizer) -> None:
    """Leave this optimizer's steps alone: they look at the gradients themselves."""
    _self_skipping.add(optimizer)


def skipping_itself(optimizer: Optimizer) -> bool:
    return optimizer in _self_skipping


def scales_of(parameter: torch.Tensor) -> Sequence[LossScale]:
    """The scales of all graphs over this parameter."""
    known: Sequence[LossScale] = _scales_of.get(parameter, ())
    return known


def scale_of(parameters: Iterable[torch.Tensor]) -> LossScale | None:
    """The scale that graphs over these parameters already use, if any."""
    return next((s for p in parameters for s in _scales_of.get(p, ())), None)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if skipping_itself(optimizer):
        return None
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
    if closure is None:
        _skip_if_overflowed(optimizer)
        return None
    # The gradients are made inside the step: look at them right after the closure has run. (It may
    # even be what compiles the model, so there is nothing to know about the parameters before.)
    checked = _checked_closure(optimizer, closure)
    return (args[0], *args[2:]), {**kwargs, "closure": checked}


def _checked_closure(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        loss = closure()
        _skip_if_overflowed(optimizer)
        return loss

    return run


def _skip_if_overflowed(optimizer: Optimizer) -> None:
    if len(_scales_of) == 0:
        return  # nothing in this process is scaled
    with_gradient = [p for p in _parameters(optimizer) if p.grad is not None]
    if not with_gradient:
        return
    # Each scale answers for the gradients of its own graphs; any overflow skips the whole step.
    scales = {id(s): s for p in _parameters(optimizer) for s in _scales_of.get(p, ())}
    skip = False
    for scale in scales.values():
        own = [p.grad for p in with_gradient if scale in _scales_of.get(p, ())]
        skip |= scale.settle(_any_nonfinite([g for g in own if g is not None]))
    if skip:
        hidden = _hidden.setdefault(optimizer, [])
        for parameter in with_gradient:
            assert parameter.grad is not None
            hidden.append((parameter, parameter.grad))
            parameter.grad = None


def _any_nonfinite(gradients: list[torch.Tensor]) -> bool:
    if not gradients:
        return False
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    # The largest magnitude over all of them: inf or nan exactly if some element is.
    norm = torch.nn.utils.get_total_norm(dense, norm_type=float("inf"))
    return not bool(norm.isfinite())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for parameter, gradient in _hidden.pop(optimizer, ()):
        if parameter.grad is None:
            parameter.grad = gradient


def _counts(value: Any) -> bool:
    return isinstance(value, int) and value >= 1


# torch's public hooks for every optimizer. They cost one length check while nothing is scaled.
register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
