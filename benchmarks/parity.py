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
import functools
import statistics
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.digits import digits
from benchmarks.harness.report import Report, Settings, environment, paragraphs, plain
from benchmarks.harness.ways import Trainer, Way
from benchmarks.papers.report import in_detail
from benchmarks.papers.rows import Work, train_row
from benchmarks.papers.rule import compare
from benchmarks.papers.task import FP32, Metrics, OneModel, Task, one_cycle
from mpcompile.demo import GPT, GPTConfig, corpus, held_out_batches, text_batches

MIXED = tuple(
    Way(f"{short} {level}", dtype, level, generated=False)
    for short, dtype in (("FP16", torch.float16), ("BF16", torch.bfloat16))
    for level in ("O1", "O2")
)


def run(settings: Settings) -> Report:
    """Train everything; under `settings.quick` three steps of one seed, without compiling."""
    device, quick = settings.device, settings.quick
    record = environment(device)
    seeds, emit = (1, "eager") if quick else (3, "inductor")
    work = Work(emit, seeds, seeds, steps=3 if quick else None, processes=False)
    rows = {task.name: train_row(task, work, device, (FP32, *MIXED)) for task in TASKS}
    compared = {
        task.name: compare(task.name, FP32.name, rows[task.name], task.grains) for task in TASKS
    }
    steps = ", ".join(f"{work.steps or task.steps} ({task.name})" for task in TASKS)
    how = (
        f"Steps: {steps}. Seeds: {', '.join(map(str, range(seeds)))}. Mixed runs were emitted with "
        f"`{emit}`. Loss scale and skipped steps are those at the end; BF16 needs no scale."
    )
    return Report(
        name=f"parity_{device.type}",
        title="Training parity with FP32",
        notes=[*paragraphs(__doc__), how],
        tables=in_detail(TASKS, rows, compared),
        verdicts={
            f"{name}, {arm}: within the spread of the FP32 seeds": held
            for name, comparison in compared.items()
            for arm, held in comparison.held.items()
        },
        data={"runs": plain(rows)},
        environment=record,
    )


# -- the two trainings -----------------------------------------------------------------------------

Batch = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """A training of plain PyTorch, the same for FP32 and for mixed precision.

    Attributes:
        model: makes it, its weights drawn from torch's global generator.
        batches: the training data in the order of a seed, without an end.
        loss: of a batch, through `model(...)` as a user would call it.
        optimizer, peak: makes it for some parameters; its highest learning rate.
        judge: metrics of a trained model. Calls `model.forward`, which is never compiled.
    """

    steps: int
    model: Callable[[], nn.Module]
    batches: Callable[[int, torch.device], Iterator[Batch]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    peak: float
    judge: Callable[[nn.Module, torch.device], Metrics]

    def __call__(self, trainer: Trainer, seed: int) -> _Training:
        return _Training(self, trainer, seed)


class _Training(OneModel):
    def __init__(self, recipe: _Recipe, trainer: Trainer, seed: int) -> None:
        self._recipe = recipe
        make = functools.partial(recipe.optimizer, lr=recipe.peak)
        cycle = one_cycle(recipe.peak, recipe.steps)
        super().__init__(trainer, seed, recipe.model(), make, schedule=cycle)

    def _draw(self, seed: int) -> Iterator[Batch]:
        return self._recipe.batches(seed, self._device)

    def _loss(self, *batch: Tensor) -> Tensor:
        return self._recipe.loss(self._net, *batch)

    def judge(self) -> Metrics:
        with torch.no_grad():
            return self._recipe.judge(self._net, self._device)


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


def _images(x: Tensor) -> Tensor:
    return x.reshape(-1, 1, 8, 8)


def _draw_digits(seed: int, device: torch.device, batch: int = 64) -> Iterator[Batch]:
    (images, labels), _ = digits(device)
    generator = torch.Generator().manual_seed(seed)
    while True:
        for chosen in torch.randperm(len(images), generator=generator).split(batch):
            if len(chosen) == batch:
                yield _images(images[chosen.to(device)]), labels[chosen.to(device)]


def _judge_digits(model: nn.Module, device: torch.device) -> Metrics:
    _, (images, labels) = digits(device)
    model.eval()
    logits = model.forward(_images(images))
    return {
        "test loss": F.cross_entropy(logits, labels).item(),
        "test accuracy, %": 100 * (logits.argmax(1) == labels).double().mean().item(),
    }


# All widths at most 256: FP16 products have no fast kernels on CPUs.
_SIZE = GPTConfig(vocab=128, context=64, width=64, layers=2, heads=2)
_TEXTS = 8
"""In a batch."""


def _ascii(part: Tensor) -> Tensor:
    return part.where(part < _SIZE.vocab, ord("?"))


def _draw_text(seed: int, device: torch.device) -> Iterator[Batch]:
    text = _ascii(corpus().train)
    for idx, targets in text_batches(text, batch=_TEXTS, context=_SIZE.context, seed=seed):
        yield idx.to(device), targets.to(device)


def _judge_text(model: nn.Module, device: torch.device) -> Metrics:
    text = _ascii(corpus().held_out)
    parts = held_out_batches(text, batch=_TEXTS, context=_SIZE.context, limit=32)
    losses = [model.forward(idx.to(device), y.to(device)).item() for idx, y in parts]
    return {"held-out loss": statistics.fmean(losses)}


_DIGITS = _Recipe(
    steps=300,
    model=_ConvNet,
    batches=_draw_digits,
    loss=lambda model, x, y: F.cross_entropy(model(x), y),
    optimizer=functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=5e-4),
    peak=0.05,
    judge=_judge_digits,
)
_TEXT = _Recipe(
    steps=400,
    model=lambda: GPT(_SIZE),
    batches=_draw_text,
    loss=lambda model, idx, targets: model(idx, targets),
    optimizer=functools.partial(torch.optim.AdamW, weight_decay=0.1),
    peak=3e-3,
    judge=_judge_text,
)
TASKS = (
    Task(
        name="Convolutional net on digits", claim="", data="", metric="test accuracy, %",
        higher=True, steps=_DIGITS.steps, start=_DIGITS, grains={"test accuracy, %": 100 / 540},
    ),
    Task(
        name="GPT on documentation", claim="", data="", metric="held-out loss", higher=False,
        steps=_TEXT.steps, start=_TEXT,
    ),
)  # fmt: skip
