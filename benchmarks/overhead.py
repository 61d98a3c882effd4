"""What a step of a model costs that computes next to nothing: linear layers, a GPT, an LSTM.

The peer is what a user of torch would write: torch.compile, autocast, GradScaler and fused AdamW.
Everything is in FP16, so that both scale the loss; also in BF16, where neither does. Each arm's
step is forward, loss, backward and update (the optimizer's step and zero_grad), in one thread.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.harness import timing
from benchmarks.harness.report import Report, Settings, Table, paragraphs, plain, where
from benchmarks.harness.ways import Way, trainer_for
from benchmarks.models import GPT2, Sample, Tagger, tokens

PHASES, WHOLE = ("forward", "backward", "update"), "the whole step"
PEER = "compile + autocast + GradScaler + fused AdamW"
PLAIN = "mpcompile O1, fused AdamW"
O1, O2 = "mpcompile O1, MPOptimizer", "mpcompile O2, MPOptimizer"
OURS = (O1, O2, PLAIN)

DTYPES = {"FP16": torch.float16, "BF16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Small:
    """A model; its loss, of the model and a batch; the batch; and in which dtypes it is timed."""

    build: Callable[[], nn.Module]
    loss: Callable[..., torch.Tensor]
    draw: Callable[[torch.device], Sequence[torch.Tensor]]
    dtypes: Sequence[str] = tuple(DTYPES)


def linears(*sizes: int, batch: int = 16) -> Small:
    """Linear layers of these sizes, with ReLU in between, and the mean squared error."""

    def build() -> nn.Module:
        layers = [m for pair in itertools.pairwise(sizes) for m in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), y)

    def draw(device: torch.device) -> Sequence[torch.Tensor]:
        return [torch.randn(batch, n, device=device) for n in (sizes[0], sizes[-1])]

    return Small(build, loss, draw)


def with_loss(build: Callable[[], nn.Module], sample: Sample, *dtypes: str) -> Small:
    """A model that returns its loss."""
    return Small(build, lambda model, *batch: model(*batch), sample.draw, dtypes)


@dataclasses.dataclass(frozen=True)
class Work:
    """What is timed, by the model's name, and how often."""

    models: Mapping[str, Small]
    rounds: int = 60
    steps: int = 20
    emit: str = "inductor"


_GPT = functools.partial(GPT2, vocab=128, context=16, width=32, layers=2, heads=2)
WORK = Work(
    {
        "one linear, 32": linears(32, 32),
        "two linears, 32": linears(32, 32, 32),
        "MLP, five linears, 64": linears(*(64,) * 6),
        "MLP, sixteen linears, 32": linears(*(32,) * 17),
        "GPT, 32 wide, two layers": with_loss(_GPT, tokens(1, 16, 128, 128), *DTYPES),
        # In FP16 the peer fails on a CPU: oneDNN has no such LSTM.
        "LSTM tagger, 32 wide": with_loss(
            functools.partial(Tagger, width=32), tokens(2, 8, 256, 16), "BF16"
        ),
    }
)
TINY = Work({"one linear, 8": linears(8, 8, batch=2)}, rounds=2, steps=1, emit="eager")

Phases = dict[str, list[float]]
"""A phase, or the whole step -> seconds, one sample for each round."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """A training step in its phases; `backward` takes the loss."""

    forward: Callable[[], torch.Tensor]
    backward: Callable[[torch.Tensor], None]
    update: Callable[[], None]

    def run(self) -> tuple[float, ...]:
        """One step. Returns the seconds of each phase."""
        clock = time.perf_counter
        begin = clock()
        loss = self.forward()
        forward = clock()
        self.backward(loss)
        backward = clock()
        self.update()
        return forward - begin, backward - forward, clock() - backward


def run(settings: Settings) -> Report:
    """Time each arm in each phase; under `settings.quick` one layer, without Inductor."""
    work, device = TINY if settings.quick else WORK, settings.device
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {
            f"{name}, {dtype}": _timed(_arms(model, DTYPES[dtype], work, device), work, device)
            for name, model in work.models.items()
            for dtype in model.dtypes
        }
    finally:
        torch.set_num_threads(threads)
    ratios = {
        name: {arm: timing.ratio(arms[PEER][WHOLE], arms[arm][WHOLE]) for arm in OURS}
        for name, arms in found.items()
    }
    return Report(
        title=f"What a small step costs, on {where(device)}",
        notes=[
            *paragraphs(__doc__),
            f"16 rows or tokens each. Microseconds, on a GPU those of the host; {work.steps} steps "
            f"in a round. {timing.how_compared(work.rounds)}",
        ],
        tables=[_table(name, arms, ratios[name]) for name, arms in found.items()],
        verdicts={
            f"{name}: {O1} takes no longer than the peer: {by_arm[O1]}": by_arm[O1].paired >= 1
            for name, by_arm in ratios.items()
        },
        data={
            "rounds": work.rounds, "steps": work.steps, "seconds": found,
            "ratios": plain(ratios),
        },
    )  # fmt: skip


# -- the arms --------------------------------------------------------------------------------------


def _arms(small: Small, dtype: torch.dtype, work: Work, device: torch.device) -> dict[str, Arm]:
    low = timing.auto_or(dtype, device)
    ways = (
        Way(PEER, dtype, compiled=True, fused=True),
        Way(O1, low, "O1", generated=True),
        Way(O2, low, "O2", generated=True),
        Way(PLAIN, low, "O1", fused=True),
    )
    return {way.name: _arm(way, small, work, device) for way in ways}


def _arm(way: Way, small: Small, work: Work, device: torch.device) -> Arm:
    torch.manual_seed(0)  # the model and its batch are the same for each arm
    trainer = trainer_for(way, work.emit, device)
    model = trainer.model(small.build())
    batch = small.draw(device)
    adam = functools.partial(torch.optim.AdamW, lr=1e-4)
    optimizer = trainer.optimizer(adam, [*model.parameters()])

    def forward() -> torch.Tensor:
        with trainer.forward():
            return small.loss(model, *batch)

    return Arm(forward, trainer.backward, lambda: trainer.update(optimizer))


# -- the clock -------------------------------------------------------------------------------------


def _timed(arms: Mapping[str, Arm], work: Work, device: torch.device) -> dict[str, Phases]:
    """The arms in turns, each round beginning with another one."""
    wait = timing.idle_wait(device)
    found: dict[str, Phases] = {name: {p: [] for p in (*PHASES, WHOLE)} for name in arms}
    for arm in arms.values():
        for _ in range(3 * work.steps):
            arm.run()
    for name, arm in timing.in_turns(list(arms.items()), work.rounds):
        for _ in range(max(1, work.steps // 4)):
            arm.run()
        wait()
        # The median: an interrupt takes as long as a step.
        steps = [arm.run() for _ in range(work.steps)]
        wait()
        for phase, seconds in zip(PHASES, zip(*steps, strict=True), strict=True):
            found[name][phase].append(statistics.median(seconds))
        found[name][WHOLE].append(statistics.median(map(sum, steps)))
    return found


# -- the tables ------------------------------------------------------------------------------------


def _table(name: str, arms: Mapping[str, Phases], ratios: Mapping[str, timing.Ratio]) -> Table:
    rows = [
        (arm, *(timing.summarize(phases[p]).text(1e6, 0) for p in (*PHASES, WHOLE)),
         str(ratios[arm]) if arm in ratios else "")
        for arm, phases in arms.items()
    ]  # fmt: skip
    return Table(name, ("arm", *PHASES, "all", "peer over ours"), rows)
