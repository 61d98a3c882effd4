"""One model's gradients by every arm, against those of the same model in FP64."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.zoo.catalogue import LIBRARIES
from benchmarks.zoo.making import Entry, Inputs
from mpcompile import MPCompileWarning, compiled_plans, mpcompile
from mpcompile.torch_inside.breaks import skipped_since

LOW = torch.float16
FLOOR = 2.0**-10
"""What FP16 may round a number by, relatively. A parameter whose gradient is a smaller part of the
whole gradient than that is measured against this part: exact arithmetic may make it zero."""

Gradients = dict[str, Tensor]


def measure(name: str, draws: int) -> dict[str, Any]:
    """Measure `library/model`.

    Returns:
        `arms`: for each, `error` and `worst` (of each draw), `dead` (parameters whose gradient is
        exactly zero where FP64's is not), `graphs`, `frames`, `skipped`, `left`, `warned`;
        or `failed`, why it didn't run.
    """
    library, _, model_name = name.partition("/")
    entry = LIBRARIES[library][model_name]
    drawn = [Draw(_model(entry, seed).state_dict(), entry.draw(torch.Generator().manual_seed(seed)))
             for seed in range(draws)]  # fmt: skip
    model = _model(entry, 0)
    exact = [_exact(entry, model, draw) for draw in drawn]
    arms = {}
    for arm in ARMS:
        try:
            arms[arm] = _compared(run(arm, entry, model, drawn), exact)
        except Exception as error:
            arms[arm] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {"name": name, "kind": entry.kind, "arms": arms}


def _model(entry: Entry, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return entry.build()


def _exact(entry: Entry, model: nn.Module, draw: Draw) -> Gradients:
    in_fp64 = copy.deepcopy(model)
    in_fp64.load_state_dict(draw.weights)
    in_fp64.double()
    if hasattr(in_fp64, "set_experts_implementation"):  # torch's grouped product has no FP64
        with contextlib.suppress(ValueError):  # a model without experts
            in_fp64.set_experts_implementation("eager")
    torch.manual_seed(0)  # as in `run`
    entry.loss(in_fp64, floating(draw.inputs, torch.float64)).backward()
    return gradients(in_fp64)


def _compared(found: Stepped, exact: list[Gradients]) -> dict[str, Any]:
    errors = [_errors(*pair) for pair in zip(found.gradients, exact, strict=True)]
    return {
        "error": [error for error, _, _ in errors],
        "worst": [worst for _, worst, _ in errors],
        "worst_parameter": [name for _, _, name in errors],
        "dead": sorted(set().union(*map(_dead, found.gradients, exact))),
        "graphs": found.graphs,
        "frames": found.frames,
        "skipped": found.skipped,
        "left": found.left,
        "warned": found.warned,
    }


def _errors(found: Gradients, exact: Gradients) -> tuple[float, float, str]:
    """Relative, over all parameters together; of the worst one; and which one that is.

    Raises:
        RuntimeError: not the same parameters have gradients.
    """
    if found.keys() != exact.keys():
        raise RuntimeError(f"gradients differ: {sorted(found.keys() ^ exact.keys())}")
    whole = _norm(exact)
    off = {name: found[name] - exact[name] for name in exact}
    worst = {
        name: float(off[name].norm() / max(float(exact[name].norm()), FLOOR * whole))
        for name in exact
    }
    name = max(worst, key=lambda name: worst[name])
    return _norm(off) / whole, worst[name], name


def _dead(found: Gradients, exact: Gradients) -> set[str]:
    """The parameters whose gradients are exactly zero although FP64's are well above rounding."""
    least = FLOOR * _norm(exact)
    return {n for n in exact if not bool(found[n].any()) and float(exact[n].norm()) > least}


def _norm(tensors: Gradients) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors.values()]).norm())


# -- arms ------------------------------------------------------------------------------------------
# The ways in which a model takes a training step: mpcompile's, and those of its peers.

COMPILED, AUTOCAST, HALF = "compile FP32", "autocast", "pure half"
LEVELS = ("O1", "O2")
ARMS = (COMPILED, AUTOCAST, HALF, *LEVELS)

_TRIES = 30
"""Steps that a scale may take to fit: GradScaler starts at 2^16 and halves."""
_RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Draw:
    """Weights and a batch."""

    weights: Mapping[str, Tensor]
    inputs: Inputs


@dataclasses.dataclass
class Stepped:
    """What an arm did with the draws.

    Attributes:
        gradients: for each draw, of each parameter that has one, unscaled, in FP64.
        skipped: steps that changed nothing, because gradients overflowed.
        graphs: that Dynamo made, over all draws.
        frames: that Dynamo left to Python, and why.
        left: why a graph of ours stayed in FP32.
        warned: mpcompile's own warnings.
    """

    gradients: list[dict[str, Tensor]]
    skipped: int = 0
    graphs: int = 0
    frames: list[str] = dataclasses.field(default_factory=list)
    left: list[str] = dataclasses.field(default_factory=list)
    warned: list[str] = dataclasses.field(default_factory=list)


def floating(value: Any, dtype: torch.dtype) -> Any:
    """The same tensor or number; the same dict, list or tuple of them, at any depth: with
    floating-point tensors in `dtype`.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: floating(item, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(floating(item, dtype) for item in value)
    return value


def run(arm: str, entry: Entry, model: nn.Module, draws: list[Draw]) -> Stepped:
    """One training step of `arm` for each of `draws`, on a copy of `model`.

    Raises:
        RuntimeError: no scale was found at which the gradients are finite, or a step moved nothing.
    """
    torch._dynamo.reset()
    counters.clear()
    model = copy.deepcopy(model)
    called = _Half(model) if arm == HALF else model
    if arm == COMPILED:
        model.compile(backend="eager")
    elif arm in LEVELS:
        mpcompile(model, dtype=LOW, level=arm, emit="aot_eager")
    scaler = torch.amp.GradScaler("cpu") if arm in (AUTOCAST, HALF) else None
    found = Stepped([])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for draw in draws:
            model.load_state_dict(draw.weights)
            torch.manual_seed(0)  # for a model that samples
            with torch.autocast("cpu", LOW, enabled=arm == AUTOCAST):
                found.skipped += _step(entry, called, draw.inputs, scaler)
            found.gradients.append(gradients(model))
    found.warned = [str(w.message) for w in caught if issubclass(w.category, MPCompileWarning)]
    found.graphs = counters["stats"]["unique_graphs"]
    found.frames = list(skipped_since({}))
    if arm in LEVELS:
        found.left = [plan.left for plan in compiled_plans(model) if plan.left]
    return found


class _Half(nn.Module):
    """A model that computes wholly in FP16, from parameters and a batch in FP32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return torch.func.functional_call(
            self.model, floating(tensors, LOW), floating(args, LOW), floating(kwargs, LOW)
        )


def _step(entry: Entry, model: nn.Module, inputs: Inputs, scaler: Any) -> int:
    """Train until one step wasn't skipped; how many were."""
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    before = [p.detach().clone() for p in model.parameters()]
    for skipped in range(_TRIES):
        optimizer.zero_grad()
        loss = entry.loss(model, inputs)
        with torch.autocast("cpu", enabled=False):
            _backward(loss, optimizer, scaler)
        if any(not p.equal(b) for p, b in zip(model.parameters(), before, strict=True)):
            return skipped
    raise RuntimeError(f"{_TRIES} steps moved no parameter")


def _backward(loss: Tensor, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    if scaler is None:
        loss.backward()
        optimizer.step()
        return
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of each parameter that has one, in FP64."""
    named = model.named_parameters()
    return {name: p.grad.double() for name, p in named if p.grad is not None}
