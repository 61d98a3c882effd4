"""The models, and each of them timed under every arm."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache

from benchmarks.harness.timing import Arm, idle_wait, take_turns
from benchmarks.models import Detector, Recommender, Sample
from benchmarks.step_times.measure import Timed, Work
from mpcompile import compiled_plans, mpcompile
from mpcompile.demo.model import GPT, GPTConfig

__all__ = [
    "ALWAYS",
    "ARMS",
    "AUTO",
    "CPU",
    "CUDA",
    "NEVER",
    "OURS",
    "PEERS",
    "TINY",
    "Found",
    "measure_all",
]

NO_PADDING, PAD_MM = "compile, no padding", "compile, pad_mm"
NEVER, AUTO, ALWAYS = "mpcompile never", "mpcompile auto", "mpcompile always"
PEERS, OURS = (NO_PADDING, PAD_MM), (NEVER, AUTO, ALWAYS)
ARMS = (*PEERS, *OURS)


def _gpt(batch: int, steps: int, **sizes: int) -> Timed:
    config = GPTConfig(**{"vocab": 50257, **sizes})
    shape = (batch, config.context)
    name = f"GPT, {config.layers} layers, width {config.width}, {config.vocab} words"
    sample = Sample(shape, shape, config.vocab, vocab=config.vocab)
    return Timed(name, functools.partial(GPT, config), sample, steps)


def _dlrm(batch: int, steps: int) -> Timed:
    return Timed(f"DLRM, B{batch}", Recommender, Sample((batch, 13), (batch,), 2), steps)


def _ssd(batch: int, size: int, width: int, steps: int) -> Timed:
    sample = Sample((batch, 3, size, size), (batch, Detector.places(size)), 81)
    return Timed(
        f"SSD heads, B{batch}, {size} px", functools.partial(Detector, width=width), sample, steps
    )


CPU = Work(
    models=(
        _gpt(2, 1, context=64, width=128, layers=2, heads=4),
        _dlrm(512, 4),
        _ssd(1, 38, 64, 2),
    )
)
# Of GPT-2's 12 layers four: its head is what is padded, and five arms compile them all.
CUDA = Work(
    models=(
        _gpt(8, 2, context=1024, width=768, layers=4, heads=12),
        _dlrm(16384, 10),
        _ssd(16, 76, 256, 4),
    )
)
TINY = Work(
    models=(
        _gpt(1, 1, vocab=61, context=8, width=32, layers=1, heads=2),
        _dlrm(4, 1),
        _ssd(1, 8, 8, 1),
    ),
    rounds=1,
    emit="eager",
)


@dataclasses.dataclass(frozen=True)
class Found:
    """What one model showed.

    Attributes:
        seconds: arm -> seconds per step, a sample a round.
        losses: arm -> the first step's.
        first: arm -> seconds of the first step, in which it is compiled.
        passes: arm of ours -> seconds in the padding passes.
        shares: arm of ours -> share of the FLOPs whose dims are aligned, as compiled.
        before: the same as captured.
    """

    seconds: dict[str, list[float]]
    losses: dict[str, float]
    first: dict[str, float]
    passes: dict[str, float]
    shares: dict[str, float]
    before: float


def measure_all(work: Work, device: torch.device) -> dict[str, Found]:
    """Time each model under every arm, one model after the other; what each showed, by name."""
    return {timed.name: _measure(timed, work, device) for timed in work.models}


def _measure(timed: Timed, work: Work, device: torch.device) -> Found:
    torch._dynamo.reset()
    models: dict[str, nn.Module] = {}
    steps: dict[str, Callable[[], Any]] = {}
    losses, first = {}, {}
    wait = idle_wait(device)
    for arm in ARMS:
        models[arm], steps[arm] = _trainee(timed, arm, work.emit, device)
        # A new cache, or "auto" would find what "never" has compiled. Inductor pads products on a
        # GPU itself unless it is told not to: the arms of ours would have its pads, too.
        with fresh_cache(), inductor.patch(shape_padding=arm == PAD_MM):
            start = time.perf_counter()
            losses[arm] = float(steps[arm]())
            wait()
            first[arm] = time.perf_counter() - start
    turns = [Arm(arm, step) for arm, step in steps.items()]
    seconds = take_turns(turns, rounds=work.rounds, steps=timed.steps, wait=wait)
    plans = {arm: compiled_plans(models[arm]) for arm in OURS}
    shares = {arm: plan.tensor_cores.share for arm, (plan,) in plans.items()}
    passes = {
        arm: plan.seconds["plan_pads"] + plan.seconds["place_pads"]
        for arm, (plan,) in plans.items()
    }
    before = plans[NEVER][0].tensor_cores.share_before
    return Found(seconds, losses, first, passes, shares, before)


def _trainee(
    timed: Timed, arm: str, emit: str, device: torch.device
) -> tuple[nn.Module, Callable[[], Any]]:
    """One compiled model, and forward and backward of it on one fixed batch."""
    torch.manual_seed(0)
    model = timed.build().to(device)
    x, targets = timed.sample.draw(device)
    low = torch.float16 if device.type == "cuda" else torch.bfloat16
    if arm in OURS:
        pad = arm.rpartition(" ")[2]
        mpcompile(model, dtype=low, pad=pad, emit=emit, loss_scale="none", strict=True)
    else:
        # Inductor's own choice is made by timing; "auto" of ours times nothing.
        options = {"shape_padding": arm == PAD_MM} if emit == "inductor" else None
        model.compile(backend=emit, options=options)

    def step() -> torch.Tensor:
        model.zero_grad()
        with torch.autocast(device.type, low) if arm in PEERS else contextlib.nullcontext():
            loss: torch.Tensor = model(x, targets)
        loss.backward()
        return loss.detach()

    return model, step
