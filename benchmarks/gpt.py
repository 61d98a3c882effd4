"""A 4-layer GPT in BF16: step time, memory and compile time against torch.compile.

The arms train the same model on the same batch: torch.compile in FP32, torch.compile under
autocast(bfloat16), and mpcompile at O1, at O2, and at O2 with `recompute=True`, which is there to
show what saving memory costs. On CUDA two more train in FP16 with a loss scale: autocast under a
GradScaler, and mpcompile at O2 under an MPOptimizer. A step is the forward (the loss is inside the
compiled function) and the backward; a second measurement adds the AdamW step.

Start times are those of a fresh process, from the call that compiles to the end of the first step
(Inductor is imported by the one or by the other): *cold* with empty caches, *warm* in later
processes that find the caches of the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):  # started as a file: `python benchmarks/gpt.py`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.harness import (
    Arm,
    Ratio,
    Report,
    Settings,
    Summary,
    Table,
    environment,
    far_behind,
    idle_wait,
    low_dtype,
    ratio,
    summarize,
    take_turns,
)
from mpcompile import MPOptimizer, compiled_plans, mpcompile
from mpcompile.demo.model import GPT, GPTConfig
from mpcompile.demo.train import bytes_saved_for_backward

FP32, AUTOCAST, O1, O2 = "compile FP32", "compile + autocast", "mpcompile O1", "mpcompile O2"
RECOMPUTE = "mpcompile O2, recompute"
HALF_AUTOCAST, HALF_O2 = "compile + autocast FP16, GradScaler", "mpcompile O2 FP16, MPOptimizer"
OPTIONS: dict[str, dict[str, Any]] = {
    O1: {"level": "O1"},
    O2: {"level": "O2"},
    RECOMPUTE: {"level": "O2", "recompute": True},
    HALF_O2: {"level": "O2", "dtype": torch.float16},
}
ARMS = (FP32, AUTOCAST, O1, O2, RECOMPUTE)
HALF_ARMS = (HALF_AUTOCAST, HALF_O2)
STARTED = (FP32, AUTOCAST, O1, O2)
OURS = (O1, O2)

OVER_AUTOCAST = 1.25
OVER_FP32 = 2.0
KEEPS = 0.97  # of compile FP32's speed, where "auto" found nothing that would be faster low
SHARE = 0.10
WARM = 1.05


@dataclasses.dataclass(frozen=True)
class Work:
    """What is measured, and how often.

    Attributes:
        half: with the arms in FP16.
        warm_starts: of each arm; 0: no start at all is measured.
    """

    model: GPTConfig = GPTConfig(vocab=4099, context=128, width=256, layers=4, heads=4)
    batch: int = 8
    emit: str = "inductor"
    rounds: int = 40
    steps: int = 4
    warm_starts: int = 7
    half: bool = False

    @property
    def arms(self) -> tuple[str, ...]:
        return (*ARMS, *(HALF_ARMS if self.half else ()))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Who is compared with whom."""
        full = [(ours, base) for ours in (O1, O2, RECOMPUTE) for base in (AUTOCAST, FP32)]
        return [*full, *([(HALF_O2, HALF_AUTOCAST)] if self.half else [])]


CPU = Work()
# Wide enough that kernels, not their launches, take the time: 14 TFLOP a step.
CUDA = Work(
    model=GPTConfig(vocab=32003, context=1024, width=2048, layers=4, heads=16),
    rounds=15,
    warm_starts=1,
    half=True,
)
TINY = Work(
    model=GPTConfig(vocab=61, context=16, width=32, layers=1, heads=2),
    batch=2,
    emit="eager",
    rounds=1,
    steps=1,
    warm_starts=0,
)


def run(settings: Settings) -> Report:
    """Measure everything; under `settings.quick` a tiny model, once, without compiling."""
    return measure(TINY if settings.quick else _work(settings.device), settings.device)


def _work(device: torch.device) -> Work:
    return CUDA if device.type == "cuda" else CPU


def measure(work: Work, device: torch.device) -> Report:
    """Steps in turns in this process, then starts in processes of their own."""
    record = environment(device)
    arms = {name: _Trainee(name, work, device) for name in work.arms}
    for trainee in arms.values():
        trainee.compile()
    first_losses = {name: float(trainee.step()) for name, trainee in arms.items()}
    saved = {name: trainee.saved_bytes() for name, trainee in arms.items()}
    lowered = {name: trainee.runs_low() for name, trainee in arms.items() if name in OURS}
    wait = idle_wait(device)
    slow = far_behind([Arm(name, trainee.step) for name, trainee in arms.items()], wait=wait)
    left_out = {name: slow[name] for name in (AUTOCAST, HALF_AUTOCAST) if name in slow}
    told = [f"{name} takes {s:.1f} s a step here: left out." for name, s in left_out.items()]
    timed_arms = {name: trainee for name, trainee in arms.items() if name not in left_out}

    def timed(step: str) -> dict[str, list[float]]:
        turns = [Arm(name, getattr(trainee, step)) for name, trainee in timed_arms.items()]
        return take_turns(turns, rounds=work.rounds, steps=work.steps, wait=wait)

    backward = timed("step")
    update = timed("step_with_update")
    started = [name for name in STARTED if name in timed_arms]
    starts = _starts(work, device, started) if work.warm_starts else {}

    ratios = {
        label: {
            f"{ours} over {base}": ratio(samples[base], samples[ours])
            for ours, base in work.pairs
            if base in samples
        }
        for label, samples in (("forward + backward", backward), ("with AdamW", update))
    }
    return Report(
        name=f"gpt_{device.type}",
        title=f"GPT training step in BF16 on {'CUDA' if device.type == 'cuda' else 'the CPU'}",
        notes=[*_notes(work), *told],
        tables=[
            _step_table(backward, update, saved, first_losses),
            _ratio_table(ratios),
            *([_start_table(starts)] if starts else []),
        ],
        verdicts=_verdicts(ratios["forward + backward"], starts, lowered),
        data={
            "work": dataclasses.asdict(work),
            "first_loss": first_losses,
            "saved_bytes": saved,
            "seconds_per_step": {"forward + backward": backward, "with AdamW": update},
            "ratios": {
                label: {name: dataclasses.asdict(value) for name, value in group.items()}
                for label, group in ratios.items()
            },
            "starts": starts,
        },
        environment=record,
    )


# -- one arm --------------------------------------------------------------------------------------


class _Trainee:
    """One model under one compiler, ready to step on one fixed batch."""

    def __init__(self, name: str, work: Work, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = GPT(work.model).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        size = (work.batch, work.model.context)
        tokens = [torch.randint(work.model.vocab, size).to(device) for _ in range(2)]
        self.idx, self.targets = tokens
        self.around: Callable[[], Any] = contextlib.nullcontext
        self.name, self.emit, self.device = name, work.emit, device
        # Off, it hands gradients and steps through.
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == HALF_AUTOCAST)
        if name in (AUTOCAST, HALF_AUTOCAST):
            low = torch.bfloat16 if name == AUTOCAST else torch.float16
            self.around = lambda: torch.autocast(device.type, low)

    def compile(self) -> None:
        if self.name in OPTIONS:
            options = {"dtype": low_dtype(self.device), **OPTIONS[self.name]}
            if self.emit != "inductor":
                options["recompute"] = False
            mpcompile(self.model, emit=self.emit, strict=True, **options)
            if self.name == HALF_O2:
                self.optimizer = MPOptimizer(self.optimizer, emit=self.emit)
        else:
            self.model.compile(backend=self.emit)

    def loss(self) -> Tensor:
        with self.around():
            result: Tensor = self.model(self.idx, self.targets)
        return result

    def step(self) -> Tensor:
        """Forward and backward; nothing waits for the device."""
        self.optimizer.zero_grad()
        loss = self.loss()
        self.scaler.scale(loss).backward()
        return loss.detach()

    def step_with_update(self) -> None:
        """Forward, backward and AdamW."""
        self.step()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def runs_low(self) -> bool:
        """Whether anything does, after a first step of ours."""
        plans = compiled_plans(self.model)
        return any(node.precision == "LOW" for plan in plans for node in plan.nodes)

    def saved_bytes(self) -> int:
        with bytes_saved_for_backward(self.model) as saved:
            self.loss()
        return sum(saved.values())


# -- starts in fresh processes --------------------------------------------------------------------


def _starts(work: Work, device: torch.device, arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Each arm: one cold start, then warm ones in turns; every arm has caches of its own."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as caches:

        def start(name: str) -> dict[str, Any]:
            return _start(name, device, Path(caches) / name.replace(" ", "_"))

        for name in arms:
            found[name] = {"cold": start(name), "warm": []}
        for _ in range(work.warm_starts):
            for name in arms:
                found[name]["warm"].append(start(name))
    return found


def _start(name: str, device: torch.device, cache: Path) -> dict[str, Any]:
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpt", "start", name, str(device)],
        cwd=root,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        what = f"the process that starts {name!r} ended with {done.returncode}"
        raise RuntimeError(f"{what}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _first_step(name: str, device: torch.device) -> dict[str, Any]:
    """What the fresh process does: the first step, timed. CPU time does not see other processes."""
    trainee, wait = _Trainee(name, _work(device), device), idle_wait(device)
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


# -- tables ---------------------------------------------------------------------------------------


def _notes(work: Work) -> list[str]:
    size = work.model
    return [
        f"{size.layers} pre-norm layers, width {size.width}, {size.heads} heads, vocabulary "
        f"{size.vocab}, {work.batch} sequences of {size.context} tokens; the loss is inside the "
        f"compiled function. Median [p10, p90] of {work.rounds} interleaved rounds of {work.steps} "
        "steps. Saved: what autograd keeps between forward and backward. A ratio is the median "
        "over the rounds of the ratio within a round, with its 95% bootstrap interval; above 1, "
        "mpcompile is faster.",
        "Starts are fresh processes, timed from the compiling call to the end of the first step. "
        "Passes: our capture and passes, as a share of the cold start. CPU seconds are the "
        "process's own and see less of what else runs on the machine.",
    ]


def _text(summary: Summary, unit: float = 1e3, digits: int = 1) -> str:
    values = (summary.median, summary.p10, summary.p90)
    middle, low, high = (f"{value * unit:.{digits}f}" for value in values)
    return f"{middle} [{low}, {high}]"


def _step_table(
    backward: dict[str, list[float]],
    update: dict[str, list[float]],
    saved: dict[str, int],
    losses: dict[str, float],
) -> Table:
    return Table(
        "Step",
        ("arm", "forward + backward, ms", "with AdamW, ms", "saved, MiB", "first loss"),
        [
            (
                name,
                _text(summarize(backward[name])),
                _text(summarize(update[name])),
                f"{saved[name] / 2**20:.1f}",
                f"{losses[name]:.4f}",
            )
            for name in backward
        ],
    )


def _ratio_table(ratios: dict[str, dict[str, Ratio]]) -> Table:
    labels = list(ratios)
    return Table(
        "How many times faster",
        ("", *(f"{label}{what}" for label in labels for what in ("", ", of medians"))),
        [
            (
                name,
                *(
                    cell
                    for label in labels
                    for value in [ratios[label][name]]
                    for cell in (str(value), f"{value.of_medians:.2f}x")
                ),
            )
            for name in ratios[labels[0]]
        ],
    )


def _start_table(starts: dict[str, dict[str, Any]]) -> Table:
    def warm(name: str, key: str) -> str:
        return _text(summarize([s[key] for s in starts[name]["warm"]]), unit=1, digits=2)

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


def _verdicts(
    ratios: dict[str, Ratio], starts: dict[str, dict[str, Any]], lowered: dict[str, bool]
) -> dict[str, bool]:
    """Ours over the peers, as far as these were timed; and the starts."""
    verdicts = {}
    for ours in OURS:
        full = OVER_FP32 if lowered[ours] else KEEPS
        for base, target in ((AUTOCAST, OVER_AUTOCAST), (FP32, full)):
            if found := ratios.get(f"{ours} over {base}"):
                claim = f"{ours} at least {target}x the speed of {base}: {found.paired:.2f}x"
                verdicts[claim] = found.paired >= target
    for ours in OURS if starts else ():
        share, warm = _share(starts[ours]), _warm_ratio(starts, ours)
        claim = f"{ours}: passes at most {SHARE:.0%} of the cold start: {share:.1%}"
        verdicts[claim] = share <= SHARE
        verdicts[f"{ours}: warm start within {WARM}x of {FP32}: {warm:.2f}x"] = warm <= WARM
    return verdicts


if __name__ == "__main__":
    if sys.argv[1:2] == ["start"]:
        print(json.dumps(_first_step(sys.argv[2], torch.device(sys.argv[3]))))
    else:
        from benchmarks.__main__ import main

        sys.exit(main(["run", "gpt", *sys.argv[1:]]))
