"""Ways to run a public script: in FP64, under autocast as its peer, and by mpcompile."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from public_programs import Script
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from mpcompile import LossScale, MPOptimizer, compiled_plans, mpcompile
from mpcompile.planner.graph_plan import GraphPlan

SCALE = 2.0**10
"""Of FP16 losses: given, so that no step is skipped in search of it."""

States = Sequence[Mapping[str, Tensor]]

FP64, AUTOCAST, FP32 = "fp64", "autocast", "fp32"
WAYS = ("O1", "O2", "whole O1", "whole O2")

PRODUCTS = ("addmm", "mm", "bmm", "baddbmm", "convolution", "convolution_backward",
            "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")  # fmt: skip


class InFP64(TorchFunctionMode):
    """Whatever asks for FP32 gets FP64. Random numbers are drawn in FP32, as elsewhere."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args, kwargs = pytree.tree_map(
            lambda a: torch.float64 if a is torch.float32 else a, (args, kwargs or {})
        )
        return pytree.tree_map(
            lambda r: r.double() if isinstance(r, Tensor) and r.dtype is torch.float32 else r,
            func(*args, **kwargs),
        )


class Scaled(TorchFunctionMode):
    """`backward()` outside of autocast, of the loss times a scale; it leaves true gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter], scale: float) -> None:
        super().__init__()
        self.parameters, self.scale = parameters, scale

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.backward:
            return func(*args, **(kwargs or {}))
        before = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        with torch.autocast("cpu", enabled=False):
            torch.autograd.backward(args[0] * self.scale)
        for p, old in zip(self.parameters, before, strict=True):
            if p.grad is not None:
                p.grad /= self.scale
            if old is not None:
                p.grad = old if p.grad is None else old + p.grad
        return None


@dataclass
class Running:
    """A script that is run in one way.

    Attributes:
        models: as the step uses them.
        step: takes a batch and the loop's state.
        plans: the plans of what was compiled until now.
        around: the context of each step.
        max_norm: to which the gradients will have been clipped, though they don't show it.
    """

    script: Script
    models: list[nn.Module]
    step: Callable[..., Any]
    state: tuple[Any, ...]
    plans: Callable[[], list[GraphPlan]] = list
    around: Callable[[], Any] = contextlib.nullcontext
    max_norm: float | None = None

    def load(self, states: States) -> None:
        """Begin again from these weights and buffers."""
        for model, state in zip(self.models, states, strict=True):
            model.load_state_dict(state)
        self.state = self.script.state(self.models)

    def take(self, batch: Sequence[Tensor]) -> float:
        """One step of the loop. Returns its loss."""
        with self.around():
            loss, *state = self.step(*batch, *self.state)
        self.state = tuple(state)
        return float(loss)

    def gradients(self) -> dict[str, Tensor | None]:
        """What a step left, in FP64, unscaled and clipped."""
        found: dict[str, Tensor | None] = {}
        for i, model in enumerate(self.models):
            for name, p in model.named_parameters():
                if p.requires_grad:
                    found[f"{i}.{name}"] = None if p.grad is None else p.grad.double()
        if self.max_norm is not None:
            norm = nn.utils.get_total_norm([g for g in found.values() if g is not None])
            factor = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
            found = {name: None if g is None else g * factor for name, g in found.items()}
        return found


def running(
    script: Script,
    states: States,
    way: str,
    dtype: torch.dtype = torch.float32,
    *,
    rate: float = 1.0,
    emit: str = "aot_eager",
) -> Running:
    """The script on models of its own, in the given states.

    Args:
        script, states: what is run.
        way: FP64, FP32, AUTOCAST, or one of WAYS.
        dtype: the low dtype, unless it is FP64 or FP32.
        rate: a factor for the learning rates.
        emit: for `mpcompile()`.
    """
    own = list(script.models())
    for model, state in zip(own, states, strict=True):
        model.load_state_dict(state)
    if way == FP64:
        own = [model.double() for model in own]
    whole, level = way.startswith("whole"), way.rpartition(" ")[2]

    def scale() -> Any:
        return LossScale.dynamic(init_scale=SCALE) if dtype is torch.float16 else "dynamic"

    options: dict[str, Any] = {"level": level, "dtype": dtype, "emit": emit}
    compiled: list[nn.Module] = []
    if way in WAYS and not whole:
        compiled = [mpcompile(model, loss_scale=scale(), **options) for model in own]
    optimizers = list(script.optimizers(own, rate))
    inside = None  # the norm to which an optimizer clips; elsewhere the step itself does
    if level == "O2":
        inside = script.clip if optimizers and not whole else None
        optimizers = [MPOptimizer(o, max_grad_norm=inside, emit="eager") for o in optimizers]

    def clip(parameters: Any) -> None:
        if script.clip is not None and inside is None:
            nn.utils.clip_grad_norm_(parameters, script.clip)

    step = script.step(own, optimizers, clip)
    plans: Callable[[], list[GraphPlan]] = list
    parameters = [p for model in own for p in model.parameters()]
    if whole:
        step = mpcompile(step, loss_scale=scale(), **options)
        plans = lambda: compiled_plans(step)  # noqa: E731
    elif compiled:
        plans = lambda: [plan for model in compiled for plan in compiled_plans(model)]  # noqa: E731
    around = _around(way, dtype, parameters)
    return Running(script, own, step, script.state(own), plans, around, inside)


def _around(way: str, dtype: torch.dtype, parameters: Sequence[Any]) -> Callable[[], Any]:
    @contextlib.contextmanager
    def autocast() -> Iterator[None]:
        scale = SCALE if dtype is torch.float16 else 1.0
        # oneDNN has no LSTM in FP16 for most CPUs, and torch asks it all the same
        with (
            torch.backends.mkldnn.flags(enabled=False),
            torch.autocast("cpu", dtype),
            Scaled(parameters, scale),
        ):
            yield

    return {FP64: InFP64, AUTOCAST: autocast}.get(way, contextlib.nullcontext)


def widened(batch: Sequence[Tensor]) -> list[Tensor]:
    return [t.double() if t.is_floating_point() else t for t in batch]


def products(run: Callable[[], Any]) -> list[str]:
    """Each product that `run()` calls, with the dtype of its operands: `"addmm float"`."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as found:
        run()
    return [
        f"{event.name().removeprefix('aten::')} {_dtype(event.dtypes())}"
        for event in found.profiler.kineto_results.events()
        if event.name().removeprefix("aten::") in PRODUCTS
    ]


def _dtype(dtypes: Sequence[str]) -> str:
    return "float" if "float" in dtypes else "double" if "double" in dtypes else "low"
