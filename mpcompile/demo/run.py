"""``mpcompile demo``: one small GPT trained twice on the same text, FP32 beside mixed precision.

The two take turns, batch by batch, so that both see the same machine at the same time.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from torch import Tensor

from ..api import mpcompile
from ..devices.registry import capabilities, default_device
from ..planner.plan_text import dtype_word, share_low, verdict
from ..rules.policy import parse_dtype
from ..runtime.records import compiled_plans, loss_scale_of
from ..settings import Emits, LevelWord
from .corpus import corpus, text_batches
from .gpt import GPT, GPTConfig
from .train import LAST_STEPS, Trainee

BATCH = 8
LEARNING_RATE = 1.5e-3
# How far the losses of the two may end from one another, of FP32's. At the demo's real size,
# rounding makes a few tenths of a percent.
APART = 0.02


@dataclasses.dataclass(frozen=True)
class DemoSettings:
    """The settings of ``mpcompile demo``; every field but `model` is an option of that command. Of
    two steps at least, the first compiles, the second measures memory.
    """

    steps: int = 200
    dtype: str = "auto"
    level: LevelWord = "O1"
    emit: Emits = "inductor"
    device: str = "auto"
    seed: int = 0
    dump: Path | None = None
    model: GPTConfig = GPTConfig()


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """What the final table shows: both models, and of the mixed-precision run its loss scale (None
    for BF16, which needs none), the skipped steps, which products ran low, and the directories of
    the dumps.
    """

    full: Trainee
    mixed: Trainee
    loss_scale: float | None
    skipped_steps: int
    low: str
    dumps: list[Path]

    @property
    def fault(self) -> str | None:
        """What is wrong with the losses, in one sentence; None if they are as they should be."""
        ours, theirs = self.mixed.train_loss, self.full.train_loss
        for one in (self.full, self.mixed):
            if not math.isfinite(loss := one.train_loss):
                return f"the training loss of {one.name} is {loss}: it should be a finite number"
        if abs(ours - theirs) <= APART * theirs:
            return None
        return (
            f"the training loss of {self.mixed.name} is {ours:.4f} and that of {self.full.name} "
            f"{theirs:.4f}: they should be within {APART:.0%} of one another"
        )


def run(settings: DemoSettings, console: Console) -> DemoResult:
    """Train both models, show progress and the table on ``console``, and return the numbers.

    Raises:
        MPCompileError: the dtype or the device is not supported.
    """
    device = default_device() if settings.device == "auto" else torch.device(settings.device)
    can = capabilities(device)
    asked = parse_dtype(settings.dtype)
    dtype = can.auto if asked is None else asked
    why = can.why_auto() if asked is None else "asked for"
    text, size, low = corpus(), settings.model, dtype_word(dtype)
    console.print(
        f"Training a GPT ({size.layers} layers, width {size.width}, context {size.context}, "
        f"batch {BATCH}) twice on {len(text):,} bytes of Python's documentation, on "
        f"[b]{device}[/b]."
    )
    console.print(f"Mixed precision: [b]{low}[/b], level {settings.level}. Why: {why}.")
    if dtype in can.slow_dtypes:
        slow = f"{low} has no fast kernels on {can.word}s: expect a very slow run."
        console.print(f"[yellow]{slow}[/yellow]")

    full, mixed = _trainees(settings, device)
    _train(full, mixed, settings, text, console)

    plans = compiled_plans(mixed.model)
    scale = loss_scale_of(mixed.model)
    mixed.name = f"{low if share_low(plans) else 'FP32'} {settings.level}"
    result = DemoResult(
        full,
        mixed,
        loss_scale=scale.value if any(plan.scaled for plan in plans) else None,
        skipped_steps=scale.skipped_steps,
        low=next(verdict("", plans)).removeprefix(": "),
        dumps=[plan.dump_dir for plan in plans if plan.dump_dir is not None],
    )
    console.print(_table(result))
    return result


def _trainees(settings: DemoSettings, device: torch.device) -> tuple[Trainee, Trainee]:
    def fresh() -> GPT:
        torch.manual_seed(settings.seed)
        return GPT(settings.model).to(device)

    full = fresh()
    full.compile(backend=settings.emit)
    mixed = mpcompile(
        fresh(), dtype=settings.dtype, level=settings.level, emit=settings.emit, dump=settings.dump
    )
    return (
        Trainee("FP32", full, steps=settings.steps, lr=LEARNING_RATE),
        Trainee(settings.level, mixed, steps=settings.steps, lr=LEARNING_RATE),
    )


def _train(
    full: Trainee, mixed: Trainee, settings: DemoSettings, tokens: Tensor, console: Console
) -> None:
    batches = text_batches(tokens, batch=BATCH, context=settings.model.context, seed=settings.seed)
    columns = (
        TextColumn("{task.description}", justify="right"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[live]}"),
    )
    with Progress(*columns, console=console) as progress:
        bars: list[tuple[Trainee, TaskID]] = [
            (trainee, progress.add_task(trainee.name, total=settings.steps, live="waiting"))
            for trainee in (full, mixed)
        ]
        for step in range(settings.steps):
            idx, targets = (tensor.to(full.device) for tensor in next(batches))
            for trainee, bar in bars:
                if step == 0:
                    progress.update(bar, live="compiling")
                if step == 1:
                    trainee.step_and_measure_memory(idx, targets)
                else:
                    trainee.step(idx, targets)
                live = f"loss {trainee.losses[-1]:.3f}  {1e3 * trainee.seconds[-1]:.0f} ms"
                progress.update(bar, advance=1, live=live)
            if step == 2 < settings.steps - 1:  # one compiles, one measures memory
                left = (settings.steps - 3) * (full.seconds[-1] + mixed.seconds[-1]) / 60
                console.print(f"About {left:.1f} minutes to go.")
            if not console.is_terminal and (step == 0 or 10 * (step + 1) % settings.steps < 10):
                console.print(_line(step + 1, full, mixed))  # a file shows no bars


def _line(step: int, *trainees: Trainee) -> str:
    """How far the training is: `"step 20: FP32 loss 3.214, 12 ms; O1 loss 3.215, 11 ms"`."""
    each = (f"{t.name} loss {t.losses[-1]:.3f}, {1e3 * t.seconds[-1]:.0f} ms" for t in trainees)
    return f"step {step}: {'; '.join(each)}"


def _table(result: DemoResult) -> Table:
    full, mixed = result.full, result.mixed
    table = Table(title="FP32 beside mixed precision: same seed, same batches")
    table.add_column()
    table.add_column(full.name, justify="right")
    table.add_column(mixed.name, justify="right")
    table.add_column("", style="dim", overflow="fold")

    row = table.add_row
    for title, name, times, digits, note in (
        ("training loss", "train_loss", 1, 4, f"nats per byte; of the last {LAST_STEPS} steps"),
        ("ms per step", "median", 1e3, 1,
         f"median; {full.median / mixed.median:.2f}x the speed of FP32"),
        ("first step, s", "first_step", 1, 1, "compiles, or finds it in Inductor's cache"),
        ("memory, MiB", "memory", 2**-20, 1,
         f"{full.memory_kind}; {mixed.memory / full.memory:.0%} of FP32's"),
    ):  # fmt: skip
        row(title, *(f"{times * getattr(one, name):.{digits}f}" for one in (full, mixed)), note)
    row("matmuls", "FP32", mixed.name.split()[0], result.low)
    if result.loss_scale is None:
        row("loss scale", "-", "none", "not needed: nothing runs in FP16")
    else:
        row("loss scale", "-", f"{result.loss_scale:g}", "dynamic, inside the compiled graph")
    row("skipped steps", "-", str(result.skipped_steps), "steps whose gradients overflowed")
    for dump in result.dumps:
        row("dump", "-", "written", str(dump))
    return table
