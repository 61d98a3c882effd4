"""What part of a program's products runs in a low dtype, and how far its gradients are off."""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpcompile import mpcompile

from .programs import inputs

__all__ = ["WAYS", "Found", "found_of"]

_LOW = ("c10::BFloat16", "c10::Half")

# Operand that holds [.., m, k], and the one with [.., k, n]; what calls these is not counted again.
_PRODUCTS = {
    "aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::mv": (0, 1), "aten::dot": (0, 1),
    "aten::addmm": (1, 2), "aten::baddbmm": (1, 2), "aten::addmv": (1, 2),
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What was found of one program, run in one way.

    Attributes:
        low: the part of the FLOPs of products whose operands are low, forward and backward; None:
            it failed.
        off: the largest distance of a parameter's gradient from FP64, relative to its norm.
        error: why it failed, or what was warned of.
    """

    low: float | None = None
    off: float | None = None
    error: str = ""


def _eager(model: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> None:
        with torch.autocast("cpu", dtype):
            loss = model(x)
        loss.backward()

    return step


def _compiled(model: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Any]:
    whole = torch.compile(lambda x: model(x), backend="aot_eager")

    def step(x: Tensor) -> None:
        with torch._dynamo.config.patch(trace_autograd_ops=True), torch.autocast("cpu", dtype):
            loss = whole(x)
        loss.backward()

    return step


def _model(model: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Any]:
    mpcompile(model, dtype=dtype, emit="aot_eager")

    def step(x: Tensor) -> None:
        model(x).backward()

    return step


def _step(model: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Any]:
    # Without rounding, what lr=1 takes off a parameter is its gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    whole = mpcompile(step, dtype=dtype, emit="aot_eager")

    def run(x: Tensor) -> None:
        before = [p.detach().clone() for p in model.parameters()]
        whole(x)
        for then, p in zip(before, model.parameters(), strict=True):
            p.grad = then - p.detach()
            p.data.copy_(then)

    return run


WAYS: dict[str, Callable[[nn.Module, torch.dtype], Callable[[Tensor], Any]]] = {
    "eager autocast": _eager,
    "compile + autocast": _compiled,
    "mpcompile(model)": _model,
    "mpcompile(step)": _step,
}


def found_of(build: Callable[[], nn.Module], way: str, dtype: torch.dtype) -> Found:
    """Run a program once to compile it, and once more to look."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = build(), inputs()
    exact = copy.deepcopy(model).double()
    exact(x.double()).backward()
    wanted = [p.grad for p in exact.parameters()]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            run = WAYS[way](model, dtype)
            run(x)
            for p in model.parameters():
                p.grad = None
            with _counted() as flops:
                run(x)
        except Exception as error:
            return Found(error=f"{type(error).__name__}: {str(error).splitlines()[0]}")
    ours = [str(one.message) for one in said if str(one.message).startswith("mpcompile")]
    off = 0.0
    for p, want in zip(model.parameters(), wanted, strict=True):
        if want is None or not want.any():
            continue
        got = torch.zeros_like(want) if p.grad is None else p.grad.double()
        off = max(off, float((got - want).norm() / want.norm()))
    low, full = flops[True], flops[False]
    return Found(low / max(low + full, 1), off, "; ".join(dict.fromkeys(ours)))


@contextlib.contextmanager
def _counted() -> Iterator[dict[bool, int]]:
    """FLOPs of products by whether their operands are low, from the profiler's record."""
    flops = {True: 0, False: 0}
    with torch.profiler.profile(record_shapes=True) as seen:
        yield flops
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    for event in events:
        if (operands := _PRODUCTS.get(event.get("name"))) is None:
            continue
        shapes, kinds = event["args"]["Input Dims"], event["args"]["Input type"]
        left, right = (shapes[i] for i in operands)
        columns = right[-1] if len(right) > 1 else 1
        flops[kinds[operands[0]] in _LOW] += 2 * prod(left) * columns
