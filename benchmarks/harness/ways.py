"""The arms of training: what each way does to a model, an optimizer, a forward and an update.

A loop is written once, against `Trainer`, as a user of plain PyTorch would write it. What a way
adds to it is what its users have to add.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch import config as functorch

from benchmarks.harness.timing import low_beside
from mpcompile import MPOptimizer, loss_scale_of, mpcompile
from mpcompile.scaling import copies

Model = TypeVar("Model", bound=nn.Module)
Update = TypeVar("Update", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        dtype: the low dtype; "auto": what mpcompile chooses; None: everything in FP32.
        level: mpcompile's; "": plain PyTorch.
        scaled: FP16 gradients have a loss scale, mpcompile's or a GradScaler.
        compiled: plain PyTorch under torch.compile; mpcompile always compiles.
        fused: plain PyTorch with fused optimizers.
        budget: torch.compile's activation_memory_budget.
        options: others of mpcompile's, or torch.compile's.
        whole: mpcompile compiles the whole step.
        generated: the optimizer is an `MPOptimizer`; None: at O2, and where the step is whole.
    """

    name: str
    dtype: torch.dtype | str | None = None
    level: str = ""
    scaled: bool = True
    compiled: bool = False
    fused: bool = False
    budget: float = 1.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    whole: bool = False
    generated: bool | None = None


class Trainer:
    """What a task's loop calls: what its user writes in plain PyTorch, and with mpcompile.

    Args:
        emit: what runs compiled graphs: "inductor", "aot_eager" or "eager".

    Attributes:
        models, optimizers: those that were made, in this order.
    """

    def __init__(self, way: Way, emit: str, device: torch.device) -> None:
        self.way, self.device = way, device
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._emit = emit
        self._clipped: dict[int, tuple[list[nn.Parameter], float]] = {}

    def model(self, model: Model) -> Model:
        """The model on the device, compiled in place where the way compiles.

        Its `forward` is never compiled: what judges a model calls that.
        """
        return self.compiled(model.to(self.device))

    def compiled(self, model: Model) -> Model:
        """The same for a model that is there already."""
        way = self.way
        if way.level and not way.whole:
            mpcompile(model, **self._options())
        elif way.compiled:
            backend = _budgeted(self._emit, way.budget) if way.budget < 1 else self._emit
            model.compile(backend=backend, options=dict(way.options) or None)
        self.models.append(model)
        return model

    def optimizer(
        self,
        make: Callable[..., torch.optim.Optimizer],
        parameters: Sequence[nn.Parameter],
        max_grad_norm: float | None = None,
    ) -> Any:
        """`make(parameters)`, which clips gradients to a norm in each `step` where one is given.

        Args:
            make: a class of torch.optim, or a partial of one.
        """
        parameters = list(parameters)
        optimizer = make(parameters, **({"fused": True} if self.way.fused else {}))
        self.optimizers.append(optimizer)
        generated = self.way.generated
        if generated or (generated is None and (self.way.level == "O2" or self.way.whole)):
            emit = "inductor" if self._emit == "inductor" else "eager"
            return MPOptimizer(optimizer, max_grad_norm=max_grad_norm, emit=emit)
        if max_grad_norm is not None:
            self._clipped[id(optimizer)] = parameters, max_grad_norm
        return optimizer

    def whole(self, update: Update) -> Update:
        """What is called for each batch: a function that calls all methods below itself (one whose
        own code names no `backward` is not compiled as a whole).
        """
        return mpcompile(update, **self._options()) if self.way.whole else update

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """Around the forward and the loss."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Adds to the gradients."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Any) -> None:
        """Clip if asked for, update, and set the gradients to None."""
        if self._clipped:
            self._clip(optimizer)
        optimizer.step()
        optimizer.zero_grad()

    def done(self) -> None:
        """After the last optimizer of a training step."""

    def update(self, optimizer: Any) -> None:
        """`step` and `done`, where there is one optimizer."""
        self.step(optimizer)
        self.done()

    def scales(self) -> list[tuple[float, int]]:
        """(loss scale, steps skipped) of each compiled model that has a scale."""
        if not self.way.level or self.way.dtype is not torch.float16 or not self.way.scaled:
            return []
        return [(s.value, s.skipped_steps) for s in map(loss_scale_of, self.models)]

    def copies(self) -> list[Tensor]:
        """Working copies of the models' weights."""
        parameters = (p for model in self.models for p in model.parameters())
        return [c.stored for p in parameters for c in copies.copies_of(p).values()]

    def kept(self) -> list[Tensor]:
        """What the optimizers keep between steps, and the working copies."""
        states = (state for optimizer in self.optimizers for state in optimizer.state.values())
        found = [value for state in states for value in state.values()]
        return [*(value for value in found if isinstance(value, Tensor)), *self.copies()]

    def _clip(self, optimizer: Any) -> None:
        if id(optimizer) in self._clipped:
            parameters, norm = self._clipped[id(optimizer)]
            nn.utils.clip_grad_norm_(parameters, norm)

    def _options(self) -> dict[str, Any]:
        return {
            "dtype": self.way.dtype,
            "level": self.way.level,
            "loss_scale": "dynamic" if self.way.scaled else "none",
            "emit": self._emit,
            "strict": True,
            **self.way.options,
        }


class AutocastTrainer(Trainer):
    """The same under autocast, and in FP16 with a GradScaler: what its user adds to the loop."""

    def __init__(self, way: Way, emit: str, device: torch.device) -> None:
        super().__init__(way, emit, device)
        enabled = way.dtype is torch.float16 and way.scaled
        self._scaler = torch.amp.GradScaler(device.type, enabled=enabled)

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        assert isinstance(self.way.dtype, torch.dtype)
        return torch.autocast(self.device.type, self.way.dtype)

    def backward(self, loss: Tensor) -> None:
        super().backward(self._scaler.scale(loss))

    def step(self, optimizer: Any) -> None:
        if id(optimizer) in self._clipped:
            self._scaler.unscale_(optimizer)
            self._clip(optimizer)
        self._scaler.step(optimizer)
        optimizer.zero_grad()

    def done(self) -> None:
        self._scaler.update()


def trainer_for(way: Way, emit: str, device: torch.device) -> Trainer:
    """The trainer that does what the way says."""
    autocast = way.dtype is not None and not way.level
    return (AutocastTrainer if autocast else Trainer)(way, emit, device)


def _budgeted(emit: str, budget: float) -> Callable[..., Any]:
    """A backend of torch.compile's: `emit` under an activation_memory_budget.

    Set around the compilation alone: set around each call, it would cost time in small models.
    """
    compile_graph = lookup_backend(emit)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        with functorch.patch(activation_memory_budget=budget):
            return compile_graph(gm, example_inputs)

    return backend


# -- everyone's ----------------------------------------------------------------------------------
# The arms: what users have without mpcompile, and mpcompile.

EAGER = "eager FP32"
COMPILED = "compile FP32"
EAGER_AUTOCAST = "eager autocast"
AUTOCAST = "compile + autocast"
BUDGETED = "compile + autocast, budget 0.5"
PEERS = (EAGER, COMPILED, EAGER_AUTOCAST, AUTOCAST, BUDGETED)
PIECES = ("mpcompile O1", "mpcompile O2")
WHOLE = ("mpcompile O1, whole step", "mpcompile O2, whole step")
GENERATED, RECOMPUTES = "mpcompile O1, MPOptimizer", "mpcompile O2, recompute"
OURS = (PIECES[0], GENERATED, PIECES[1], *WHOLE)


def everyones(device: torch.device, emit: str) -> tuple[Way, ...]:
    """All arms on a device: on a CPU in BF16, else in FP16; ours by `dtype="auto"`.

    Every peer has a fused optimizer, those in FP16 a GradScaler. Only Inductor recomputes.
    """
    low, ours = low_beside(device), "auto"
    return (
        Way(EAGER, fused=True),
        Way(COMPILED, compiled=True, fused=True),
        Way(EAGER_AUTOCAST, low, fused=True),
        Way(AUTOCAST, low, compiled=True, fused=True),
        Way(BUDGETED, low, compiled=True, fused=True, budget=0.5),
        Way(PIECES[0], ours, "O1", fused=True),
        Way(GENERATED, ours, "O1", generated=True),
        Way(PIECES[1], ours, "O2"),
        Way(WHOLE[0], ours, "O1", whole=True),
        Way(WHOLE[1], ours, "O2", whole=True),
        Way(RECOMPUTES, ours, "O2", options={"recompute": emit == "inductor"}),
    )
