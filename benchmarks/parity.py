"""Training parity on real data: FP16 and BF16, O1 and O2, against the spread of FP32 seeds.

Two trainings, each from three seeds (a seed sets the initial weights and the order of the data): a
small convolutional net on scikit-learn's digits, and a small GPT on the text of Python's own
documentation. The FP32 runs are plain eager PyTorch. The mixed runs differ from them in one line,
`mpcompile(model, ...)`: same seeds, same optimizer, same loop. Everything is judged by the same
eager FP32 forward on data held out from training.

The rule: S is the spread of a metric, its largest value over the FP32 seeds less its smallest (for
an accuracy at least one test image). A mixed precision passes if the mean over its seeds is at most
S away from the FP32 mean ("off the mean"), and no single run is more than S away from the FP32 run
of its seed ("off the seed", the worst of them).
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

if __package__ in (None, ""):  # started as a file: `python benchmarks/parity.py`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from benchmarks.harness import Report, Settings, Table, environment
from mpcompile import loss_scale_of, mpcompile
from mpcompile.demo import GPT, GPTConfig, corpus, held_out_batches, text_batches

FP32 = "FP32"
MIXED = {
    f"{short} {level}": (dtype, level)
    for short, dtype in (("FP16", torch.float16), ("BF16", torch.bfloat16))
    for level in ("O1", "O2")
}

Batch = tuple[Tensor, Tensor]
Metrics = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Task:
    """One training: what it needs, and how the result is judged.

    Attributes:
        model: makes it, its weights drawn from torch's global generator.
        batches: the training data in the order of a seed, `steps` of them.
        loss: of a batch, through `model(...)` as a user would call it.
        optimizer, peak: makes it for some parameters; its highest learning rate.
        judge: metrics of a trained model. Calls `model.forward`, which is never compiled.
        grains: metric -> the smallest spread that means anything.
    """

    name: str
    steps: int
    model: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[Batch]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    peak: float
    judge: Callable[[nn.Module], Metrics]
    grains: Metrics


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One run. The last two are None without a loss scale."""

    metrics: Metrics
    loss_scale: float | None = None
    skipped_steps: int | None = None


def run(settings: Settings) -> Report:
    """Train everything; under `settings.quick` three steps of one seed, without compiling."""
    record = environment(settings.device)
    quick = settings.quick
    seeds = range(1 if quick else 3)
    tasks = [make(3 if quick else steps, settings.device) for make, steps in _TASKS]
    emit = "eager" if quick else "inductor"
    results = {task.name: _train_all(task, seeds, emit, settings.device) for task in tasks}
    compared = {task.name: _compare(task, results[task.name]) for task in tasks}
    return Report(
        name=f"parity_{settings.device.type}",
        title="Training parity with FP32",
        notes=[*(__doc__ or "").strip().split("\n\n")[1:], _how(tasks, seeds, emit)],
        tables=[
            table
            for task in tasks
            for table in (compared[task.name].table, _scale_table(task, results[task.name]))
        ],
        verdicts={
            f"{name}, {arm}: within the spread of the FP32 seeds": held
            for name, comparison in compared.items()
            for arm, held in comparison.held.items()
        },
        data={
            "runs": {
                name: {
                    arm: [dataclasses.asdict(outcome) for outcome in outcomes]
                    for arm, outcomes in arms.items()
                }
                for name, arms in results.items()
            }
        },
        environment=record,
    )


def _how(tasks: list[Task], seeds: range, emit: str) -> str:
    steps = ", ".join(f"{task.steps} ({task.name})" for task in tasks)
    return (
        f"Steps: {steps}. Seeds: {', '.join(map(str, seeds))}. Mixed runs were emitted with "
        f"`{emit}`. Loss scale and skipped steps are those at the end; BF16 needs no scale."
    )


# -- training -------------------------------------------------------------------------------------


def _train_all(
    task: Task, seeds: range, emit: str, device: torch.device
) -> dict[str, list[Outcome]]:
    outcomes: dict[str, list[Outcome]] = {arm: [] for arm in (FP32, *MIXED)}
    for arm, seed in itertools.product(outcomes, seeds):
        start = time.perf_counter()
        outcome = _train(task, arm, seed, emit, device)
        outcomes[arm].append(outcome)
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in outcome.metrics.items())
        spent = time.perf_counter() - start
        print(f"{task.name}, {arm}, seed {seed}: {metrics} ({spent:.0f} s)", file=sys.stderr)
    return outcomes


def _train(task: Task, arm: str, seed: int, emit: str, device: torch.device) -> Outcome:
    torch._dynamo.reset()  # each run compiles anew: no limit on recompilations is reached
    torch.manual_seed(seed)
    model = task.model().to(device)
    if arm in MIXED:
        dtype, level = MIXED[arm]
        mpcompile(model, dtype=dtype, level=level, emit=emit, strict=True)
    losses = _loop(task, model, seed)
    last = losses[-max(1, len(losses) // 10) :]
    metrics = {"last training loss": statistics.fmean(last), **task.judge(model)}
    if arm in MIXED and MIXED[arm][0] is torch.float16:
        scale = loss_scale_of(model)
        return Outcome(metrics, scale.value, scale.skipped_steps)
    return Outcome(metrics)


def _loop(task: Task, model: nn.Module, seed: int) -> list[float]:
    """The training loop of plain PyTorch, the same for FP32 and for mixed precision."""
    optimizer = task.optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=task.peak, total_steps=task.steps + 1, cycle_momentum=False
    )
    losses = []
    for inputs, targets in task.batches(seed):
        loss = task.loss(model, inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


# -- the two tasks --------------------------------------------------------------------------------


class _ConvNet(nn.Module):
    """Images (B, 1, 8, 8) -> logits (B, 10): conv, batch norm, ReLU, pooling, linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *self._block(1, 16), *self._block(16, 32), nn.MaxPool2d(2),
            *self._block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(64, 10)

    @staticmethod
    def _block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def _digits(steps: int, device: torch.device) -> Task:
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.3, stratify=labels, random_state=0)
    train_x, test_x, train_y, test_y = (torch.tensor(part).to(device) for part in split)
    train_x, test_x = (x.float().reshape(-1, 1, 8, 8) / 16 for x in (train_x, test_x))
    batch = 64

    def batches(seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        epochs = (torch.randperm(len(train_x), generator=generator) for _ in itertools.count())
        full = (part for epoch in epochs for part in epoch.split(batch) if len(part) == batch)
        for chosen in itertools.islice(full, steps):
            yield train_x[chosen.to(device)], train_y[chosen.to(device)]

    @torch.no_grad()
    def judge(model: nn.Module) -> Metrics:
        model.eval()
        logits = model.forward(test_x)
        return {
            "test loss": F.cross_entropy(logits, test_y).item(),
            "test accuracy, %": 100 * (logits.argmax(1) == test_y).double().mean().item(),
        }

    return Task(
        name="Convolutional net on digits",
        steps=steps,
        model=_ConvNet,
        batches=batches,
        loss=lambda model, x, y: F.cross_entropy(model(x), y),
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=0.05, momentum=0.9, weight_decay=5e-4
        ),
        peak=0.05,
        judge=judge,
        grains={"test accuracy, %": 100 / len(test_y)},
    )


def _text(steps: int, device: torch.device) -> Task:
    # All widths at most 256: FP16 products have no fast kernels on CPUs.
    size = GPTConfig(vocab=128, context=64, width=64, layers=2, heads=2)
    text = corpus()
    train, held_out = (
        part.where(part < size.vocab, ord("?")) for part in (text.train, text.held_out)
    )
    batch = 8

    def batches(seed: int) -> Iterator[Batch]:
        endless = text_batches(train, batch=batch, context=size.context, seed=seed)
        for idx, targets in itertools.islice(endless, steps):
            yield idx.to(device), targets.to(device)

    @torch.no_grad()
    def judge(model: nn.Module) -> Metrics:
        parts = held_out_batches(held_out, batch=batch, context=size.context, limit=32)
        losses = [model.forward(idx.to(device), y.to(device)).item() for idx, y in parts]
        return {"held-out loss": statistics.fmean(losses)}

    return Task(
        name="GPT on documentation",
        steps=steps,
        model=lambda: GPT(size),
        batches=batches,
        loss=lambda model, idx, targets: model(idx, targets),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1),
        peak=3e-3,
        judge=judge,
        grains={},
    )


_TASKS: tuple[tuple[Callable[[int, torch.device], Task], int], ...] = (
    (_digits, 300),
    (_text, 400),
)


# -- the comparison -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """A task's table, and for each mixed precision whether every metric passes the rule."""

    table: Table
    held: dict[str, bool]


def _compare(task: Task, results: dict[str, list[Outcome]]) -> _Comparison:
    rows: list[tuple[str, ...]] = []
    held = dict.fromkeys(MIXED, True)
    for metric in results[FP32][0].metrics:
        full = [outcome.metrics[metric] for outcome in results[FP32]]
        spread = max(max(full) - min(full), task.grains.get(metric, 0.0))
        for arm, outcomes in results.items():
            values = [outcome.metrics[metric] for outcome in outcomes]
            mean, paired = deviations(full, values)
            offs = ("-", "-", f"{spread:.4f}")
            if arm != FP32:
                offs = (f"{mean:+.4f}", f"{paired:+.4f}", "")
                held[arm] &= abs(mean) <= spread and abs(paired) <= spread
            seeds = " ".join(f"{value:.4f}" for value in values)
            rows.append((metric, arm, f"{statistics.fmean(values):.4f}", seeds, *offs))
    columns = ("metric", "precision", "mean", "seeds", "off the mean", "off the seed", "S")
    return _Comparison(Table(task.name, columns, rows), held)


def _scale_table(task: Task, results: dict[str, list[Outcome]]) -> Table:
    rows = [
        (
            arm,
            " ".join(f"{outcome.loss_scale:g}" for outcome in outcomes),
            " ".join(str(outcome.skipped_steps) for outcome in outcomes),
        )
        for arm, outcomes in results.items()
        if outcomes[0].loss_scale is not None
    ]
    columns = ("precision", "final loss scale, by seed", "skipped steps, by seed")
    return Table(f"{task.name}: loss scaling", columns, rows)


def deviations(full: list[float], mixed: list[float]) -> tuple[float, float]:
    """(mean of `mixed` less that of `full`; the difference of the pair that differs most)."""
    pairs = [b - a for a, b in zip(full, mixed, strict=True)]
    return statistics.fmean(pairs), max(pairs, key=abs)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["run", "parity", *sys.argv[1:]]))
