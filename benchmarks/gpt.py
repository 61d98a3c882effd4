"""A 4-layer GPT in BF16: step time and memory against torch.compile.

The arms train the same model on the same batch: torch.compile in FP32, torch.compile under
autocast(bfloat16), and mpcompile at O1, at O2, and at O2 with `recompute=True`, which is there to
show what saving memory costs; on CUDA also O1 without padding, as the vocabulary there is odd. A
step is the forward (the loss is inside the compiled function) and the backward; a second
measurement adds the AdamW step. (In FP16, with a loss scale, `real_models` trains a GPT-2 on CUDA.)
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from benchmarks.harness import timing
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
    full = CUDA if device.type == "cuda" else CPU
    work = TINY if settings.quick else full
    return make_report(work, device, measure_all(work, device))


# -- arms ------------------------------------------------------------------------------------------
# What is compared: the arms, the sizes, and one model under one compiler.

RECOMPUTE, UNPADDED = "mpcompile O2, recompute", "mpcompile O1, no padding"
ARMS = (FP32, AUTOCAST, O1, O2, RECOMPUTE)
PAIRS = (
    *((ours, base) for ours in (O1, O2, RECOMPUTE) for base in (AUTOCAST, FP32)),
    (O1, UNPADDED),
)
"""Who is compared with whom."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What is measured, and how often."""

    model: GPTConfig = GPTConfig(vocab=4099, context=128, width=256, layers=4, heads=4)
    batch: int = 8
    emit: str = "inductor"
    rounds: int = 40
    steps: int = 4
    arms: tuple[str, ...] = ARMS


CPU = Work()
# Wide enough that kernels, not their launches, take the time: 14 TFLOP a step.
CUDA = Work(
    model=GPTConfig(vocab=32003, context=1024, width=2048, layers=4, heads=16),
    rounds=15,
    arms=(*ARMS, UNPADDED),
)
TINY = Work(
    model=GPTConfig(vocab=61, context=16, width=32, layers=1, heads=2),
    batch=2,
    emit="eager",
    rounds=1,
    steps=1,
    arms=CUDA.arms,
)


def _ways(device: torch.device, emit: str) -> dict[str, Way]:
    """All arms; only Inductor recomputes, and pads products itself where it isn't told not to."""
    found, recompute = ways(device), {"recompute": emit == "inductor"}
    unpadded = {"options": {"shape_padding": False}} if emit == "inductor" else {}
    return found | {
        RECOMPUTE: dataclasses.replace(found[O2], name=RECOMPUTE, options=recompute),
        UNPADDED: dataclasses.replace(
            found[O1], name=UNPADDED, options={"pad": "never", **unpadded}
        ),
    }


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
# Steps of all arms in turns.


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
    """

    losses: dict[str, float]
    saved: dict[str, int]
    lowered: dict[str, bool]
    slow: dict[str, float]
    backward: dict[str, list[float]]
    update: dict[str, list[float]]


def measure_all(work: Work, device: torch.device) -> Measured:
    """Compile every arm, and time those that are not far behind."""
    arms = {name: Trainee(name, work, device) for name in work.arms}
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

    return Measured(losses, saved, lowered, slow, timed("step"), timed("step_with_update"))


# -- report ----------------------------------------------------------------------------------------
# Ratios, verdicts and tables of what was measured.

OVER_AUTOCAST = 1.25
OVER_FP32 = 2.0
KEEPS = 0.97  # of compile FP32's speed, where "auto" found nothing that would be faster low


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
        tables=[_step_table(found), _ratio_table(ratios)],
        verdicts=dict(verdicts(ratios["forward + backward"], found.lowered)),
        data={
            "work": plain(work),
            "first_loss": found.losses,
            "saved_bytes": found.saved,
            "seconds_per_step": times,
            "ratios": plain(ratios),
        },
    )


def _notes(work: Work) -> list[str]:
    size = work.model
    return [
        f"{size.layers} pre-norm layers, width {size.width}, {size.heads} heads, vocabulary "
        f"{size.vocab}, {work.batch} sequences of {size.context} tokens; the loss is inside the "
        f"compiled function. {work.steps} steps in a round. {timing.how_compared(work.rounds)} "
        "Saved: what autograd keeps between forward and backward."
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


def verdicts(ratios: dict[str, timing.Ratio], lowered: dict[str, bool]) -> Claims:
    """Ours over the peers, as far as these were timed."""
    for ours in OURS:
        full = OVER_FP32 if lowered[ours] else KEEPS
        for base, target in ((AUTOCAST, OVER_AUTOCAST), (FP32, full)):
            if value := ratios.get(f"{ours} over {base}"):
                claim = f"{ours} at least {target}x the speed of {base}: {value.paired:.2f}x"
                yield claim, value.paired >= target
