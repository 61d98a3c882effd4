"""A 4-layer GPT in BF16: step time, memory and compile time against torch.compile.

The arms train the same model on the same batch: torch.compile in FP32, torch.compile under
autocast(bfloat16), and mpcompile at O1, at O2, and at O2 with `recompute=True`, which is there to
show what saving memory costs. A step is the forward (the loss is inside the compiled function) and
the backward; a second measurement adds the AdamW step. (In FP16, with a loss scale, `real_models`
trains a GPT-2 on CUDA.)

Start times are those of a fresh process, from the call that compiles to the end of the first step
(Inductor is imported by the one or by the other): *cold* with empty caches, *warm* in later
processes that find the caches of the first.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.harness import timing
from benchmarks.harness.processes import starts_in_turns
from benchmarks.harness.report import Claims, Report, Settings, Table, plain, where
from benchmarks.harness.ways import Way
from benchmarks.models import tokens
from benchmarks.step_times import AUTOCAST, FP32, O1, O2, OURS, Begun, Timed, ways
from mpcompile import compiled_plans
from mpcompile.demo.gpt import GPT, GPTConfig
from mpcompile.demo.train import bytes_saved_for_backward


def run(settings: Settings) -> Report:
    """Measure everything; under `settings.quick` a tiny model, once, without compiling."""
    device = settings.device
    work = TINY if settings.quick else work_for(device)
    return make_report(work, device, measure_all(work, device))


# -- arms ------------------------------------------------------------------------------------------
# What is compared: the arms, the sizes, and one model under one compiler.

RECOMPUTE = "mpcompile O2, recompute"
ARMS = (FP32, AUTOCAST, O1, O2, RECOMPUTE)
STARTED = (FP32, AUTOCAST, O1, O2)
PAIRS = tuple((ours, base) for ours in (O1, O2, RECOMPUTE) for base in (AUTOCAST, FP32))
"""Who is compared with whom."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What is measured, and how often.

    Attributes:
        warm_starts: of each arm; 0: no start at all is measured.
    """

    model: GPTConfig = GPTConfig(vocab=4099, context=128, width=256, layers=4, heads=4)
    batch: int = 8
    emit: str = "inductor"
    rounds: int = 40
    steps: int = 4
    warm_starts: int = 7


CPU = Work()
# Wide enough that kernels, not their launches, take the time: 14 TFLOP a step.
CUDA = Work(
    model=GPTConfig(vocab=32003, context=1024, width=2048, layers=4, heads=16),
    rounds=15,
    warm_starts=1,
)
TINY = Work(
    model=GPTConfig(vocab=61, context=16, width=32, layers=1, heads=2),
    batch=2,
    emit="eager",
    rounds=1,
    steps=1,
    warm_starts=0,
)


def _ways(device: torch.device, emit: str) -> dict[str, Way]:
    """All arms; only Inductor recomputes."""
    found, recompute = ways(device), {"recompute": emit == "inductor"}
    return found | {RECOMPUTE: dataclasses.replace(found[O2], name=RECOMPUTE, options=recompute)}


def work_for(device: torch.device) -> Work:
    """The full size on this type of device."""
    return CUDA if device.type == "cuda" else CPU


class Trainee(Begun):
    """The GPT under one arm, with AdamW."""

    def __init__(self, name: str, work: Work, device: torch.device) -> None:
        vocab = work.model.vocab
        sample = tokens(work.batch, work.model.context, vocab, vocab)
        timed = Timed("GPT", functools.partial(GPT, work.model), sample, work.steps)
        super().__init__(_ways(device, work.emit)[name], timed, work.emit, device)
        adam = functools.partial(torch.optim.AdamW, lr=1e-4)
        self.optimizer = self.trainer.optimizer(adam, [*self.model.parameters()])

    def step_with_update(self) -> None:
        """Forward, backward and AdamW."""
        self.step()
        self.trainer.update(self.optimizer)

    def runs_low(self) -> bool:
        """Whether anything does, after a first step of ours."""
        plans = compiled_plans(self.model)
        return any(node.precision == "LOW" for plan in plans for node in plan.nodes)

    def saved_bytes(self) -> int:
        with bytes_saved_for_backward(self.model) as saved:
            self.loss()
        return sum(saved.values())


# -- measure ---------------------------------------------------------------------------------------
# Steps of all arms in turns in this process, then starts in processes of their own.


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the arms showed. Each dict is by the arm's name.

    Attributes:
        losses: the first step's.
        saved: bytes that autograd keeps for the backward.
        lowered: whether anything runs low; for the arms that the verdicts are about.
        slow: seconds of a step, for those that are too slow to be timed any further.
        backward: seconds of forward and backward, a sample a round.
        update: the same with the optimizer's step.
        starts: "cold": what `first_step` found, "warm": a list of the same; empty if not measured.
    """

    losses: dict[str, float]
    saved: dict[str, int]
    lowered: dict[str, bool]
    slow: dict[str, float]
    backward: dict[str, list[float]]
    update: dict[str, list[float]]
    starts: dict[str, dict[str, Any]]


def measure_all(work: Work, device: torch.device) -> Measured:
    """Compile every arm, time those that are not far behind, then their starts."""
    arms = {name: Trainee(name, work, device) for name in ARMS}
    for trainee in arms.values():
        trainee.compile()
    losses = {name: float(trainee.step()) for name, trainee in arms.items()}
    saved = {name: trainee.saved_bytes() for name, trainee in arms.items()}
    lowered = {name: trainee.runs_low() for name, trainee in arms.items() if name in OURS}
    wait = timing.idle_wait(device)
    behind = timing.far_behind(
        [timing.Arm(name, trainee.step) for name, trainee in arms.items()], wait=wait
    )
    slow = {name: behind[name] for name in (AUTOCAST,) if name in behind}
    timed_arms = {name: trainee for name, trainee in arms.items() if name not in slow}

    def timed(step: str) -> dict[str, list[float]]:
        turns = [timing.Arm(name, getattr(trainee, step)) for name, trainee in timed_arms.items()]
        return timing.take_turns(turns, rounds=work.rounds, steps=work.steps, wait=wait)

    backward = timed("step")
    update = timed("step_with_update")
    started = [name for name in STARTED if name in timed_arms]
    starts = measure_starts(work, device, started) if work.warm_starts else {}
    return Measured(losses, saved, lowered, slow, backward, update, starts)


# -- starts ----------------------------------------------------------------------------------------
# Starts in fresh processes: from the call that compiles to the end of the first step.


def measure_starts(
    work: Work, device: torch.device, arms: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Each arm: one cold start, then warm ones in turns; every arm has caches of its own."""
    calls = {name: (name, device.type) for name in arms}
    found = starts_in_turns(1 + work.warm_starts, "benchmarks.gpt:first_step", calls)
    return {name: {"cold": cold, "warm": warm} for name, (cold, *warm) in found.items()}


def first_step(name: str, kind: str) -> dict[str, Any]:
    """What the fresh process does: the first step, timed. CPU time does not see other processes."""
    device = torch.device(kind)
    trainee, wait = Trainee(name, work_for(device), device), timing.idle_wait(device)
    wait()
    wall, cpu = time.perf_counter(), time.process_time()
    trainee.compile()
    trainee.step()
    wait()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    counters = torch._dynamo.utils.counters
    plans = compiled_plans(trainee.model) if name in OURS else []
    return {
        "seconds": wall,
        "cpu_seconds": cpu,
        "passes": sum(sum(plan.seconds.values()) for plan in plans),
        "cache_hits": counters["aot_autograd"]["autograd_cache_hit"],
    }


# -- report ----------------------------------------------------------------------------------------
# Ratios, verdicts and tables of what was measured.

OVER_AUTOCAST = 1.25
OVER_FP32 = 2.0
KEEPS = 0.97  # of compile FP32's speed, where "auto" found nothing that would be faster low
SHARE = 0.10
WARM = 1.05


def make_report(work: Work, device: torch.device, found: Measured) -> Report:
    """The whole report."""
    times = {"forward + backward": found.backward, "with AdamW": found.update}
    ratios = {
        label: {
            f"{ours} over {base}": timing.ratio(samples[base], samples[ours])
            for ours, base in PAIRS
            if base in samples
        }
        for label, samples in times.items()
    }
    told = [f"{name} takes {s:.1f} s a step here: left out." for name, s in found.slow.items()]
    return Report(
        title=f"GPT training step in BF16 on {where(device)}",
        notes=[*_notes(work), *told],
        tables=[
            _step_table(found),
            _ratio_table(ratios),
            *([_start_table(found.starts)] if found.starts else []),
        ],
        verdicts=dict(verdicts(ratios["forward + backward"], found.starts, found.lowered)),
        data={
            "work": plain(work),
            "first_loss": found.losses,
            "saved_bytes": found.saved,
            "seconds_per_step": times,
            "ratios": plain(ratios),
            "starts": found.starts,
        },
    )


def _notes(work: Work) -> list[str]:
    size = work.model
    return [
        f"{size.layers} pre-norm layers, width {size.width}, {size.heads} heads, vocabulary "
        f"{size.vocab}, {work.batch} sequences of {size.context} tokens; the loss is inside the "
        f"compiled function. {work.steps} steps in a round. {timing.how_compared(work.rounds)} "
        "Saved: what autograd keeps between forward and backward.",
        "Starts are fresh processes, timed from the compiling call to the end of the first step. "
        "Passes: our capture and passes, as a share of the cold start. CPU seconds are the "
        "process's own and see less of what else runs on the machine.",
    ]


def _step_table(found: Measured) -> Table:
    return Table(
        "Step",
        ("arm", "forward + backward, ms", "with AdamW, ms", "saved, MiB", "first loss"),
        [
            (
                name,
                timing.summarize(samples).text(),
                timing.summarize(found.update[name]).text(),
                f"{found.saved[name] / 2**20:.1f}",
                f"{found.losses[name]:.4f}",
            )
            for name, samples in found.backward.items()
        ],
    )


def _ratio_table(ratios: dict[str, dict[str, timing.Ratio]]) -> Table:
    rows = []
    for name in next(iter(ratios.values())):
        found = [group[name] for group in ratios.values()]
        rows.append((name, *(x for one in found for x in (str(one), f"{one.of_medians:.2f}x"))))
    columns = (f"{label}{what}" for label in ratios for what in ("", ", of medians"))
    return Table("How many times faster", ("", *columns), rows)


def _start_table(starts: dict[str, dict[str, Any]]) -> Table:
    def warm(name: str, key: str) -> str:
        return timing.summarize([s[key] for s in starts[name]["warm"]]).text(unit=1, digits=2)

    return Table(
        "Start of a fresh process",
        ("arm", "cold, s", "passes in it, s", "share", "warm, s", "warm, CPU s", "cache hits"),
        [
            (
                name,
                f"{start['cold']['seconds']:.1f}",
                f"{start['cold']['passes']:.2f}" if name in OURS else "-",
                f"{_share(start):.1%}" if name in OURS else "-",
                warm(name, "seconds"),
                warm(name, "cpu_seconds"),
                f"{sum(s['cache_hits'] > 0 for s in start['warm'])} of {len(start['warm'])}",
            )
            for name, start in starts.items()
        ],
    )


def _share(start: dict[str, Any]) -> float:
    return float(start["cold"]["passes"] / start["cold"]["seconds"])


def _warm_ratio(starts: dict[str, dict[str, Any]], ours: str) -> float:
    """Our median warm start over that of torch.compile in FP32; above 1 is slower."""
    ours_s, plain_s = (median(s["seconds"] for s in starts[n]["warm"]) for n in (ours, FP32))
    return float(ours_s / plain_s)


def verdicts(
    ratios: dict[str, timing.Ratio], starts: dict[str, dict[str, Any]], lowered: dict[str, bool]
) -> Claims:
    """Ours over the peers, as far as these were timed; and the starts."""
    for ours in OURS:
        full = OVER_FP32 if lowered[ours] else KEEPS
        for base, target in ((AUTOCAST, OVER_AUTOCAST), (FP32, full)):
            if value := ratios.get(f"{ours} over {base}"):
                claim = f"{ours} at least {target}x the speed of {base}: {value.paired:.2f}x"
                yield claim, value.paired >= target
    for ours in OURS if starts else ():
        share, warm = _share(starts[ours]), _warm_ratio(starts, ours)
        claim = f"{ours}: passes at most {SHARE:.0%} of the cold start: {share:.1%}"
        yield claim, share <= SHARE
        yield f"{ours}: warm start within {WARM}x of {FP32}: {warm:.2f}x", warm <= WARM
