"""`MPOptimizer`: any torch.optim optimizer, with a compiled step that never waits for the GPU."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch.optim import Optimizer
from typing_extensions import Self

from ..errors import CannotRewrite, MPCompileError, warn
from ..ranks.zero import is_zero, partition_of, step_with
from ..scaling import parameters
from ..scaling.loss_scale import LossScale
from ..scaling.parameters import parameters_of
from ..settings import OPTIONS, Emits, Mode
from ..torch_inside.optimizers import note_step, without_wrappers
from .checks import check, check_arguments, check_group, check_ranks
from .compiled import Emit
from .compiled_steps import CompiledSteps, LastKey
from .eager import is_op_by_op
from .first_state import move_scalar_state
from .members import StepKey, members_of
from .reports import Results, held_by
from .rests_on import of_key
from .saved import SavedScales, counters_on_host, load_checked, saved
from .shadow import HOOKS

F = TypeVar("F", bound=Callable[..., Any])


def untraced(method: F) -> F:
    """`torch.compiler.disable`, but the method keeps its type for callers: torch gives none."""
    disabled: F = torch.compiler.disable(method)
    return disabled


class MPOptimizer(Optimizer):
    """Wraps an optimizer and compiles its step; everything else in the training loop is unchanged.

        optimizer = MPOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), max_grad_norm=1.0)

    The optimizer's own step is traced, rewritten and compiled, or torch's fused kernel does it. The
    step checks that every gradient is finite, clips, updates in FP32, writes the low-precision
    copies that models read, and moves the loss scale. If a gradient is not finite, no parameter,
    moment or counter changes. The step never waits for the device.

    An MPOptimizer is a torch.optim.Optimizer over the same `param_groups` and `state`: schedulers,
    hooks, `add_param_group` and `zero_grad` work. Its `state_dict()` is that of the inner optimizer
    plus `"loss_scale"`; each can load the other's. Of parameters that are stored in BF16 or FP16,
    the state holds FP32 masters, `state[p]["master"]`, beside moments in FP32.

    Args:
        optimizer: any torch.optim optimizer whose step can be traced, also a subclass of yours if
            it keeps its state in tensors. Its `foreach` and `fused` settings are ignored.
        loss_scale: a `LossScale` for the models that it trains, in place of the one that each makes
            for itself. Refused for a model that was given another one, or has run already.
        max_grad_norm: clip the global 2-norm of the gradients before the update, as
            `torch.nn.utils.clip_grad_norm_` would.
        emit: "inductor", or "aot_eager" / "eager": the rewritten step, operator by operator.
        mode, options: Inductor's, as in `torch.compile`.
        verify: compare what Inductor compiles, at its first call, with the same graph run operator
            by operator, and put right what is wrong; False: don't; "always": at every call.
        dump: directory for the graphs of the step, as traced and as rewritten.

    Attributes:
        skipped: 0-d bool on the device: whether the last step was skipped.
        grad_norm: 0-d FP32 on the device: the norm before clipping (with `max_grad_norm`).
        skipped_steps: how many steps were skipped (an int; reading it waits for the device).
        compilations: how many times a step was traced, or bound to torch's fused kernel.
        left: why no step can be compiled, so that they run operator by operator; else None.

    Raises:
        MPCompileError: LBFGS, SparseAdam and the like, which need more than a step; a bad argument.
    """

    def __new__(cls, *args: Any, **options: Any) -> Self:
        check_arguments(cls, args, options)
        return super().__new__(cls)

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        loss_scale: LossScale | None = None,
        max_grad_norm: float | None = None,
        emit: Emits = "inductor",
        mode: Mode | None = None,
        options: Mapping[str, Any] | None = None,
        verify: bool | Literal["always"] = True,
        dump: str | Path | None = None,
    ) -> None:
        if isinstance(optimizer, MPOptimizer):
            raise MPCompileError(
                "MPOptimizer: this already is one; wrap the torch.optim optimizer once"
            )
        check(optimizer, loss_scale, max_grad_norm, emit, mode, options)
        self._inner = optimizer
        self._max_grad_norm = max_grad_norm
        verifying = OPTIONS["verify"].parse("verify", verify)
        self._emit = Emit(emit, mode, tuple(sorted((options or {}).items())), verifying.when)
        self._dump = OPTIONS["dump"].parse("dump", dump) if dump is not None else None
        self._given_scale = loss_scale
        self._saved_scales = SavedScales()  # those loaded before their models' first run
        self._start()

    vars(__new__)["__wrapped__"] = __init__  # help() shows these arguments

    def _start(self) -> None:
        # The attributes that torch's own __init__ makes, without a second set of groups.
        for name in HOOKS:
            setattr(self, name, getattr(self._inner, name, OrderedDict()))
        self._patch_step_function()
        parameters.of_optimizer(self).skips_by_itself = True
        self._connected = check_ranks(self._inner, self._max_grad_norm)
        self._own_scale = self._given_scale or LossScale.static(1.0)
        self._last: LastKey | None = None
        self.left: str | None = None
        self._results = Results()
        self._steps = CompiledSteps(self._max_grad_norm, self._results, self._emit, self._dump)
        parameters.own(parameters_of(self._inner), self, self._given_scale)

    # -- the optimizer underneath ------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        return self._part.state

    @state.setter
    def state(self, state: Any) -> None:
        self._part.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._inner.defaults

    def __getattr__(self, name: str) -> Any:
        # An optimizer that averages weights (schedule-free ones) has these; trainers ask for them.
        if name in ("train", "eval") and "_inner" in self.__dict__:
            return getattr(self._inner, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim. Takes effect in the next step.

        Raises:
            MPCompileError: complex parameters, `differentiable=True`, or other processes' meshes.
        """
        self._inner.add_param_group(param_group)
        try:
            check_group(type(self._inner).__name__, self._inner.param_groups[-1])
            self._connected = check_ranks(self._inner, self._max_grad_norm)
        except MPCompileError:
            del self._inner.param_groups[-1]
            raise
        parameters.own(parameters_of(self._inner), self, self._given_scale)

    def __repr__(self) -> str:
        return f"MPOptimizer({self._inner!r})"

    # -- the step ----------------------------------------------------------------------------------

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step, if every gradient is finite. Returns the closure's loss, or None.

        Raises:
            MPCompileError: a sparse gradient, or a step over shards that can't be traced; says what
                to do.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        note_step(self._inner)  # for its own schedulers
        if is_zero(self._inner):
            step_with(self._inner, self._step_part, without_wrappers(type(self._inner).step))
        else:
            self._step_part()
        return loss

    def _step_part(self) -> None:
        """The step of the parameters that this process updates."""
        known = self._known_key()
        if not known.key.members:
            return
        try:
            by_operator = is_op_by_op() or self.left is not None
            step = None if by_operator else self._steps.compiled(known, self._part)
        except CannotRewrite as error:
            self._leave(error, known)
        else:
            known.step = step
            (step or self._steps.by_operator(known.key, self._part)).run(self._part)

    def _leave(self, error: CannotRewrite, known: LastKey) -> None:
        """Do this step and all others operator by operator, since none can be compiled."""
        name = type(self._part).__name__
        if self._connected is not None:  # what it does to a shard is not what it does to the whole
            raise MPCompileError(
                f"MPOptimizer: the step of {name} can't be traced: {error}. Use it as it is: "
                "mpcompile(model) scales and skips for plain optimizers too"
            ) from error
        # An error of the optimizer's own comes up here.
        self._steps.by_operator(known.key, self._part).run(self._part)
        self.left = str(error)
        warn(
            f"MPOptimizer: the step of {name} can't be compiled: {error}. It runs operator by "
            f"operator from now on, as {name} itself does it, between the same checks, and waits "
            "for the device"
        )

    @property
    def _part(self) -> Optimizer:
        """The optimizer whose step is compiled: of ZeRO, the one over this rank's partition."""
        return partition_of(self._inner)

    def _known_key(self) -> LastKey:
        # Most steps are like the one before; checking that is cheaper than making a key.
        if self._last is not None and self._last.rests_on.holds(self._inner):
            return self._last
        sharded = self._connected is not None
        members = members_of(self._inner, sharded=sharded)
        key = StepKey.of(members, self._own_scale, self._connected)
        given = self._given_scale
        if given is not None and any(scale is not given for scale in key.scales):
            raise MPCompileError(
                f"MPOptimizer(loss_scale={given!r}): a model of these parameters scales by another "
                "one. Make the MPOptimizer before the model's first forward, and don't hand the "
                "model a scale of its own; or hand both the same LossScale"
            )
        self._last = LastKey(key, of_key(self._inner, key.scales, sharded=sharded))
        return self._last

    @property
    def compilations(self) -> int:
        """How many times a step was traced and compiled."""
        return self._steps.compilations

    # Untraced: a graph would read these before the step that it holds has written them.
    @property
    @untraced
    def skipped(self) -> torch.Tensor:
        """0-d bool on the device: whether the last step was skipped."""
        return self._results.read("skipped", False)

    @property
    @untraced
    def grad_norm(self) -> torch.Tensor:
        """0-d FP32 on the device: the global norm before clipping; NaN without `max_grad_norm`."""
        if self._max_grad_norm is None:
            return torch.tensor(math.nan)
        return self._results.read("norm", math.nan)

    @property
    def inner(self) -> Optimizer:
        """The optimizer that this one wraps."""
        return self._inner

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped; reading it waits for the device."""
        scales = list(self._models_scales()) or [self._own_scale]
        return sum(scale.skipped_steps for scale in scales)

    def _models_scales(self) -> dict[LossScale, list[int]]:
        """The loss scales of its models -> the indices of their parameters in this optimizer."""
        found: dict[LossScale, list[int]] = {}
        for index, parameter in enumerate(parameters_of(self._inner)):
            for scale in parameters.scales_of(parameter):
                found.setdefault(scale, []).append(index)
        return found

    def scales_appeared(self) -> None:
        """A model ran for the first time: apply the state that was loaded for its loss scale."""
        if self._saved_scales.waiting:
            self._saved_scales.restore(self._models_scales(), appeared=True)

    def memory(self) -> dict[str, float]:
        """Average bytes held for each element of a parameter, by kind: the FP32 `masters`, their
        low-precision `copies`, the `gradients` that exist now, and the optimizer's `state`.
        """
        return held_by(self._inner, self.state)

    # -- checkpoints -------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Of a ZeroRedundancyOptimizer: bring the state of all ranks to the rank `to`, which may
        then call `state_dict()`. All ranks must call this. Others have nothing to bring.
        """
        if is_zero(self._inner):
            self._inner.consolidate_state_dict(to)  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's own state, as in plain PyTorch, plus `"loss_scale"`."""
        state = counters_on_host(self._inner.state_dict())
        live = [saved(scale, indices) for scale, indices in self._models_scales().items()]
        if not live and not self._saved_scales.waiting:
            live = [{**self._own_scale.state_dict(), "own": True}]
        return {**state, "loss_scale": [*live, *self._saved_scales.waiting]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state of an MPOptimizer or of the plain inner optimizer. `"loss_scale"` may
        also be the state of a `torch.amp.GradScaler`. Loss scales of models that never ran are not
        known yet; they are set when the models run.

        Nothing changes where an error is raised.

        Raises:
            MPCompileError: the state holds more loss scales than this optimizer's models have, or
                is of parameters of other shapes.
            ValueError: it has other param groups (torch's own error).
        """
        plain = {k: v for k, v in state_dict.items() if k != "loss_scale"}
        saved = state_dict.get("loss_scale", [])
        entries = [saved] if isinstance(saved, Mapping) else list(saved)
        known = self._models_scales()
        if known and len(entries) > len(known):
            raise MPCompileError(
                f"MPOptimizer.load_state_dict: {len(entries)} loss scales were saved, {len(known)} "
                "are known here; run a forward of each model first, or load loss_scale_of(model)"
            )
        load_checked(self._inner, plain)
        move_scalar_state(self._part)
        for entry in entries:
            if entry.get("own"):  # its models had no scale, or hadn't run
                self._own_scale.load_state_dict(entry)
        self._saved_scales = SavedScales([e for e in entries if not e.get("own")])
        self._saved_scales.restore(known)
        self._steps.forget()
        self._last = None

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler sets a `step` on its optimizer; torch's own pickles leave that out, too.
        passing = ("_steps", "_last", "_results", "step", *HOOKS)
        return {k: v for k, v in self.__dict__.items() if k not in passing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()
        self._own_scale = state["_own_scale"]
