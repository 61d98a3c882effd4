"""Train the models of a check, with all that Inductor compiles verified: `check()`."""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..api import mpcompile
from ..errors import MPCompileWarning, in_one_line
from ..optim import MPOptimizer
from ..torch_inside.inductor import fresh_cache
from ..verify.compile import all_verdicts
from ..verify.verdicts import Verdict
from .models import MODELS, Model

__all__ = ["Result", "check", "tried"]

_STEPS = 4  # as often is looked at what was constant, or took too long, in a first call

_APART = 0.05
"""How far the last loss may be from that of plain torch in FP32, relative: verification compares
each function with its graph; this, what came of all of them.
"""


@dataclass(frozen=True)
class Result:
    """What a training of one model has shown.

    Attributes:
        about: the model.
        values: how many values of compiled functions were compared, and right.
        worst: how far the worst of them is off, in units of what rounding does uncompiled.
        faults: what is wrong, each in a sentence.
        open: what isn't verified, and why.
        seconds: what it took.
    """

    about: str
    values: int
    worst: float
    faults: tuple[str, ...]
    open: tuple[str, ...]
    seconds: float


def check(device: torch.device, out: Path | None = None) -> Iterator[Result]:
    """Train each model on a device, with nothing that was compiled or found before.

    Args:
        device: where.
        out: a folder that takes a program of torch's alone for each graph that is compiled
            wrongly; None: they are not kept.
    """
    with tempfile.TemporaryDirectory(prefix="mpcompile-check-") as folder:
        with fresh_cache(dir=folder, delete=False):
            for model in MODELS:
                yield tried(model, device)
        programs = Path(folder).glob("*/mpcompile/*/*.py")
        if out is not None and (found := sorted(programs)):
            out.mkdir(parents=True, exist_ok=True)
            for program in found:
                shutil.copy(program, out)


def tried(model: Model, device: torch.device) -> Result:
    """Train one model, with what is compiled of it verified."""
    start = time.perf_counter()
    torch.compiler.reset()
    faults: list[str] = []
    with (
        all_verdicts() as found,
        warnings.catch_warnings(record=True) as said,
        torch.random.fork_rng(),
    ):
        warnings.simplefilter("always")
        try:
            faults += _differs(model, device)
        except Exception as error:  # whatever a compiler, or another torch, may raise
            faults.append(f"it raises {in_one_line(error)}")
    verdicts = [(name, verdict) for one in found for name, verdict in one.known.items()]
    faults += [f"compiled wrongly: {v.wrong}; cured by {v.cure}" for _, v in verdicts if v.wrong]
    ours = [str(w.message) for w in said if issubclass(w.category, MPCompileWarning)]
    faults += [text for text in ours if "compiled wrongly" not in text]
    values = sum(v.values for _, v in verdicts)
    if not values:
        faults.append("nothing was verified")
    return Result(
        model.about, values, max((v.worst for _, v in verdicts), default=0.0), tuple(faults),
        tuple(f"{name}: {text}" for name, v in verdicts if (text := _open(v))),
        time.perf_counter() - start,
    )  # fmt: skip


def _open(verdict: Verdict) -> str:
    counts = {
        "constant": verdict.unproven,
        "drawn elsewhere": verdict.drawn,
        "for lack of time": verdict.late,
    }
    found = [f"{count} {what}" for what, count in counts.items() if count]
    return verdict.left or ", ".join(found)


def _differs(model: Model, device: torch.device) -> list[str]:
    """Train it twice: by mpcompile, and by plain torch in FP32. How they differ, if they do."""
    low, full = _losses(model, device), _losses(model, device, plain=True)
    if abs(low[-1] - full[-1]) <= _APART * abs(full[-1]):
        return []
    return [
        f"its loss is {low[-1]:.4g} after {_STEPS} steps, in FP32 without mpcompile {full[-1]:.4g}"
    ]


def _losses(model: Model, device: torch.device, plain: bool = False) -> Sequence[float]:
    torch.manual_seed(0)
    net = model.make().to(device)
    batch = [x.to(device) for x in model.batch()]
    optimizer = model.optimizer(net.parameters())
    step = _step(net, optimizer)
    if not plain:
        options: Any = {"dtype": model.dtype, "level": model.level}
        if model.dtype is torch.float16:
            options["loss_scale"] = 1024.0  # so that no step is skipped
        if model.whole:
            step = mpcompile(step, **options)
        else:
            net = net if model.dtype is None else mpcompile(net, **options)
            step = _step(net, MPOptimizer(optimizer))
    return [step(*batch).item() for _ in range(_STEPS)]


def _step(net: nn.Module, optimizer: Optimizer) -> Callable[..., Tensor]:
    def step(*batch: Tensor) -> Tensor:
        result = net(*batch)
        loss: Tensor = result if result.dim() == 0 else result.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
