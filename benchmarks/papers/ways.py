"""The ways to train: what each does to a model, an optimizer, a forward and an update.

A task's loop is written once, against `Trainer`, as a user of plain PyTorch would write it. What a
way adds to it is what its users have to add.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch import config as functorch

from mpcompile import MPOptimizer, loss_scale_of, mpcompile

__all__ = ["FP32", "QUALITY", "UNSCALED", "Trainer", "Way"]

Model = TypeVar("Model", bound=nn.Module)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        dtype: the low dtype; "auto": what mpcompile chooses; None: everything in FP32.
        level: mpcompile's, with `MPOptimizer` at O2; "": plain PyTorch.
        scaled: FP16 gradients have a loss scale, mpcompile's or a GradScaler.
        compiled: plain PyTorch under torch.compile; mpcompile always compiles.
        fused: plain PyTorch with fused optimizers.
        budget: torch.compile's activation_memory_budget.
        recompute: mpcompile's option.
    """

    name: str
    dtype: torch.dtype | str | None = None
    level: str = ""
    scaled: bool = True
    compiled: bool = False
    fused: bool = False
    budget: float = 1.0
    recompute: bool = False


_HALF, _BRAIN = torch.float16, torch.bfloat16

FP32 = Way("FP32")
UNSCALED = Way("FP16 O2, no loss scale", _HALF, "O2", scaled=False)
QUALITY = (
    FP32,
    UNSCALED,
    Way("FP16 O1", _HALF, "O1"),
    Way("FP16 O2", _HALF, "O2"),
    Way("BF16 O1", _BRAIN, "O1"),
    Way("BF16 O2", _BRAIN, "O2"),
)
"""What is trained to the end."""


class Trainer:
    """What a task's loop calls. `way` decides what each call adds.

    Args:
        emit: what runs compiled graphs: "inductor", "aot_eager" or "eager".
    """

    def __init__(self, way: Way, emit: str, device: torch.device) -> None:
        self.way, self.device = way, device
        self._emit = emit
        self._models: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._norms: dict[int, tuple[list[nn.Parameter], float]] = {}
        self._scaler = torch.amp.GradScaler(
            device.type, enabled=not way.level and way.dtype is _HALF and way.scaled
        )

    def model(self, model: Model) -> Model:
        """The model on the device, compiled in place where the way compiles.

        Its `forward` is never compiled: what judges a model calls that.
        """
        model.to(self.device)
        way = self.way
        if way.level:
            scale = "dynamic" if way.scaled else "none"
            mpcompile(
                model, dtype=way.dtype, level=way.level, loss_scale=scale, emit=self._emit,
                recompute=way.recompute, strict=True,
            )  # fmt: skip
        elif way.compiled:
            budgeted = way.budget < 1
            model.compile(backend=_budgeted(self._emit, way.budget) if budgeted else self._emit)
        self._models.append(model)
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
        self._optimizers.append(optimizer)
        if self.way.level == "O2":
            emit = "inductor" if self._emit == "inductor" else "eager"
            return MPOptimizer(optimizer, max_grad_norm=max_grad_norm, emit=emit)
        if max_grad_norm is not None:
            self._norms[id(optimizer)] = parameters, max_grad_norm
        return optimizer

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """Around the forward and the loss."""
        if self.way.level or not isinstance(self.way.dtype, torch.dtype):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.way.dtype)

    def backward(self, loss: Tensor) -> None:
        """Adds to the gradients."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Any) -> None:
        """Clip if asked for, update, and set the gradients to None."""
        if id(optimizer) in self._norms:
            parameters, norm = self._norms[id(optimizer)]
            self._scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, norm)
        self._scaler.step(optimizer)
        optimizer.zero_grad()

    @property
    def models(self) -> tuple[nn.Module, ...]:
        return tuple(self._models)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return tuple(self._optimizers)

    def done(self) -> None:
        """After the last optimizer of a training step."""
        self._scaler.update()

    def scales(self) -> list[tuple[float, int]]:
        """(loss scale, steps skipped) of each compiled model that has a scale."""
        if not self.way.level or self.way.dtype is not _HALF or not self.way.scaled:
            return []
        scales = [loss_scale_of(model) for model in self._models]
        return [(scale.value, scale.skipped_steps) for scale in scales]


def _budgeted(emit: str, budget: float) -> Callable[..., Any]:
    """A backend of torch.compile's: `emit` under an activation_memory_budget.

    Set around the compilation alone: set around each call, it would cost time in small models.
    """
    compile_graph = lookup_backend(emit)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        with functorch.patch(activation_memory_budget=budget):
            return compile_graph(gm, example_inputs)

    return backend
