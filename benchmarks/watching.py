"""What it costs, while nothing overflows, to be ready to name what does.

Both arms of a pair are one model and one optimizer. "ready" is what users get: each step notes
whether it was skipped. In "off" nothing is noted. The loss scale fits, so no step is skipped. What
is kept of each graph, to be run node by node, is there in both, and in the last table.

Both arms ask, in each forward, whether the step is to be watched. That is one attribute; the first
table has its time.
"""

from __future__ import annotations

import dataclasses
import functools
import timeit
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.harness.ratios import Ratio, ratio, summarize
from benchmarks.harness.record import environment
from benchmarks.harness.report import Report, Settings, Table, paragraphs, plain, where
from benchmarks.harness.timing import Arm, idle_wait, low_dtype, take_turns
from benchmarks.models import MLP, Sample
from mpcompile import LossScale, MPOptimizer, compiled_plans, loss_scale_of, mpcompile, pipeline
from mpcompile.demo.model import GPT, GPTConfig
from mpcompile.ir.scale import ScaleRule, ScaleState
from mpcompile.scaling.live_scale import LiveScale
from mpcompile.scaling.skips_in_a_row import Trouble

READY, OFF = "ready", "off"
OPTIMIZERS = ("AdamW", "MPOptimizer")
NOTED = ("skipping", "settled", "stepped")
"""What a `Trouble` is told by each step."""
MOST = 1.01


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model to train, and how many steps make a sample."""

    build: Callable[[], nn.Module]
    sample: Sample
    steps: int


@dataclasses.dataclass(frozen=True)
class Work:
    """What is timed, and whose copies are measured."""

    models: Mapping[str, Trained]
    deep: GPTConfig
    rounds: int = 40
    emit: str = "inductor"


def _tokens(batch: int, config: GPTConfig) -> Sample:
    shape = (batch, config.context)
    return Sample(shape, shape, config.vocab, config.vocab)


DEMO, DEEP = GPTConfig(), GPTConfig(vocab=512, context=64, width=64, layers=24, heads=2)
SMALL = GPTConfig(vocab=61, context=16, width=32, layers=1, heads=2)
WORK = Work(
    {
        "MLP, B64 D64": Trained(MLP, Sample((64, 64), (64,), 10), steps=100),
        "demo GPT, B4": Trained(functools.partial(GPT, DEMO), _tokens(4, DEMO), steps=4),
    },
    DEEP,
)
TINY = Work(
    {"MLP": Trained(functools.partial(MLP, inputs=8, width=8), Sample((4, 8), (4,), 10), steps=1)},
    SMALL, rounds=2, emit="eager",
)  # fmt: skip


def run(settings: Settings) -> Report:
    """Time training steps at O1; under `settings.quick` of a tiny model, without Inductor."""
    work = TINY if settings.quick else WORK
    record = environment(settings.device)
    noted, copies = _noting(), _copies(work, settings.device)
    samples = {
        f"{name}, {optimizer}": _timed(trained, optimizer, work, settings.device)
        for name, trained in work.models.items()
        for optimizer in OPTIMIZERS
    }
    ratios = {name: ratio(arms[READY], arms[OFF]) for name, arms in samples.items()}
    how = (
        f"Forward, backward and step at O1. Median [p10, p90] of {work.rounds} interleaved rounds. "
        "A ratio is the median over the rounds of ready/off within a round, with its 95% bootstrap "
        "interval."
    )
    return Report(
        name=f"watching_{settings.device.type}",
        title=f"Being ready to name what overflows, on {where(settings.device)}",
        notes=[*paragraphs(__doc__), how],
        tables=[_noting_table(noted), _step_table(samples, ratios), _copies_table(copies)],
        verdicts={
            f"{name}: no more than {MOST}x as long, as far as this run can tell: {_text(found)}": (
                found.low <= MOST
            )
            for name, found in ratios.items()
        },
        data={
            "rounds": work.rounds,
            "nanoseconds": noted,
            "seconds_per_step": samples,
            "ratios": plain(ratios),
            "copies": copies,
        },
        environment=record,
    )


def _timed(
    trained: Trained, optimizer: str, work: Work, device: torch.device
) -> dict[str, list[float]]:
    """Seconds per step of either arm, a sample a round."""
    step, trouble = _training(trained, optimizer, work.emit, device)
    for _ in range(3):
        step()
    told: dict[str, dict[str, Any]] = {
        READY: {name: getattr(trouble, name) for name in NOTED},
        OFF: dict.fromkeys(NOTED, _nothing),
    }

    def arm(name: str) -> Arm:
        def told_so() -> None:
            vars(trouble).update(told[name])
            step()

        return Arm(name, told_so)

    arms = [arm(READY), arm(OFF)]
    return take_turns(
        arms, rounds=work.rounds, steps=trained.steps, settle=max(1, trained.steps // 4),
        wait=idle_wait(device),
    )  # fmt: skip


def _training(
    trained: Trained, optimizer: str, emit: str, device: torch.device
) -> tuple[Callable[[], object], Trouble]:
    """A step of a training, and what it is noted in."""
    torch.manual_seed(0)
    model = trained.build().to(device)
    x, targets = trained.sample.draw(device)
    scale = LossScale.dynamic(init_scale=2.0**7)
    mpcompile(model, dtype=low_dtype(device), emit=emit, strict=True, loss_scale=scale)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    held = MPOptimizer(inner, emit=emit) if optimizer == "MPOptimizer" else inner

    def step() -> None:
        held.zero_grad()
        model(x, targets).backward()
        held.step()

    return step, loss_scale_of(model).trouble


def _nothing(*_: object, **__: object) -> None: ...


# -- what a step is told, and what is kept ---------------------------------------------------------


def _noting() -> dict[str, float]:
    """Nanoseconds of each thing that a step does, without a model."""
    live = LiveScale(ScaleState(1.0), ScaleRule())
    live.reside(torch.device("cpu"))
    trouble = Trouble(live)
    trouble.judge = mock.Mock()
    calls: dict[str, Callable[[], Any]] = {
        "a forward asks whether it is watched": lambda: trouble.pending,
        "the step of a plain optimizer": lambda: trouble.settled(overflow=False),
        "the step of an MPOptimizer, an eighth of a read included": lambda: trouble.stepped(
            live.stepped()
        ),
    }
    repeats = 20_000
    return {
        name: min(timeit.repeat(call, number=repeats, repeat=5)) / repeats * 1e9
        for name, call in calls.items()
    }


def _copies(work: Work, device: torch.device) -> dict[str, float]:
    """Of a deep GPT: the nodes of its graph, seconds spent on the copies, the bytes that they hold,
    and seconds of capture and of all passes.
    """
    copy, found = pipeline._copied, {"seconds": 0.0, "bytes": 0.0}

    def counted(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        found["seconds"] += min(timeit.repeat(lambda: copy(gm), number=1, repeat=3))
        tracemalloc.start()
        made = copy(gm)
        found["bytes"] += tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return made

    torch.manual_seed(0)
    model = GPT(work.deep).to(device)
    scale = LossScale.dynamic(init_scale=2.0**7)
    mpcompile(model, dtype=low_dtype(device), emit="eager", strict=True, loss_scale=scale)
    tokens = torch.randint(work.deep.vocab, (2, work.deep.context)).to(device)
    with mock.patch.object(pipeline, "_copied", counted):
        model(tokens, tokens)
    (plan,) = compiled_plans(model)
    passes = sum(plan.seconds.values())
    return {"layers": work.deep.layers, "nodes": len(plan.after), **found, "passes": passes}


def _noting_table(noted: Mapping[str, float]) -> Table:
    rows = [(name, f"{time:.0f}") for name, time in noted.items()]
    return Table("What a step is told", ("what", "nanoseconds"), rows)


def _step_table(
    samples: Mapping[str, Mapping[str, list[float]]], ratios: Mapping[str, Ratio]
) -> Table:
    columns = ("training", "ready, ms", "off, ms", "ready over off")
    rows = [
        (name, *(summarize(arms[arm]).text(digits=3) for arm in (READY, OFF)), _text(ratios[name]))
        for name, arms in samples.items()
    ]
    return Table("Step", columns, rows)


def _text(found: Ratio) -> str:
    return f"{found.paired:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _copies_table(copies: Mapping[str, float]) -> Table:
    row = (
        f"{copies['layers']:.0f}", f"{copies['nodes']:.0f}", f"{copies['seconds'] * 1e3:.0f}",
        f"{copies['bytes'] / 1e6:.2f}", f"{copies['passes'] * 1e3:.0f}",
    )  # fmt: skip
    columns = ("layers of a GPT", "nodes", "both copies, ms", "held, MB", "capture and passes, ms")
    return Table("The copies of a graph", columns, [row])
