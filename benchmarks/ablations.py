"""Why FP16 training needs FP32 master weights: the same training with them and without.

The ablation of "Mixed Precision Training" (Micikevicius et al., ICLR 2018, section 3.1), made
small: a perceptron on scikit-learn's digits, plain torch.optim, the same seeds and the same batches
for every arm. (That of section 3.2, a training without loss scaling, is a column of `papers`.)

The classifier learns with SGD and a small learning rate, so that most updates are less than 2^-11
of their weight. An FP16 number has 11 significant bits: adding such an update rounds back to the
weight. The two FP16 arms differ in one thing, whether weights are rounded to FP16 when training
starts and after each update. The update itself is computed in FP32 in both.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.digits import Split, digits
from benchmarks.harness.report import Report, Settings, Table, paragraphs, plain
from benchmarks.harness.timing import spans
from mpcompile import mpcompile

DEVICES = ("cpu",)
"""What FP16 can hold is the same everywhere; a GPU would only launch small kernels."""


def run(settings: Settings) -> Report:
    """Train everything; under `settings.quick` a few steps of one seed."""
    device = settings.device
    seeds = range(1 if settings.quick else 3)
    steps = 4 if settings.quick else 8000
    found = {arm: [train(arm, seed, steps, device) for seed in seeds] for arm in ARMS}
    return Report(
        title="What master weights are for",
        notes=[
            *paragraphs(__doc__),
            f"Steps: {steps}, of {BATCH} images. Seeds: {', '.join(map(str, seeds))}. Losses are "
            "over held-out digits, by an eager FP32 forward. Figure: docs/figures/ablations.svg, "
            "which `python -m benchmarks.figures` draws.",
        ],
        tables=[_table(found)],
        verdicts=verdicts(found),
        data={"master weights": plain(found)},
    )


# -- trainings -------------------------------------------------------------------------------------
# They differ in where weights are stored.

FP32, MASTERS, HALF_WEIGHTS = "FP32", "FP16, FP32 master weights", "FP16, FP16 weights"
ARMS = (FP32, MASTERS, HALF_WEIGHTS)

BATCH = 128
SMALL_RATE = 5e-4
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        before, after: loss over held-out digits, by an eager FP32 forward.
        steps: of the optimizer.
        curve: training loss, means over equal spans of the steps.
        small, vanishing: shares of the updates, means over the steps: those below 2^-11 of their
            weight, and those that leave it as it is if it is stored in FP16.
    """

    before: float
    after: float
    steps: int
    curve: list[float]
    small: float = 0.0
    vanishing: float = 0.0

    @property
    def progress(self) -> float:
        return self.before - self.after


Results = dict[str, list[Outcome]]
"""Arm -> an outcome for each seed."""


def train(arm: str, seed: int, steps: int, device: torch.device = CPU) -> Outcome:
    """Train the classifier, in the loop of plain PyTorch; `arm` is one of `ARMS`."""
    (train_x, train_y), (test_x, test_y) = digits(device)
    mean, deviation = train_x.mean(), train_x.std()
    images, held_out = (train_x - mean) / deviation, ((test_x - mean) / deviation, test_y)
    torch.manual_seed(seed)
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise((64, 128, 128, 10))]
    model = nn.Sequential(*list(itertools.chain(*layers))[:-1]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=SMALL_RATE)
    if arm != FP32:
        torch._dynamo.reset()  # each run compiles again: no limit on recompilations is reached
        # `eager` rounds exactly where the plan says so; a fused kernel may keep FP32 between.
        mpcompile(model, dtype=torch.float16, emit="eager", strict=True)
    if arm == HALF_WEIGHTS:
        _store_in_half(model)
        optimizer.register_step_post_hook(lambda *_: _store_in_half(model))
    before, losses, shares = _held_out(model, held_out), [], []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(images), (BATCH,), generator=generator).to(device)
        loss = F.cross_entropy(model(images[chosen]), train_y[chosen])
        loss.backward()
        losses.append(loss.item())
        shares.append(_update_shares(model))
        optimizer.step()
        optimizer.zero_grad()
    small, vanishing = map(statistics.fmean, zip(*shares, strict=True))
    after = _held_out(model, held_out)
    return Outcome(before, after, steps, spans(losses, 40), small, vanishing)


@torch.no_grad()
def _held_out(model: nn.Module, data: Split) -> float:
    return F.cross_entropy(model.forward(data[0]), data[1]).item()


@torch.no_grad()
def _store_in_half(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.half())


@torch.no_grad()
def _update_shares(model: nn.Module) -> tuple[float, float]:
    """`small` and `vanishing` of the updates that are not zero in FP32, as if all weights were
    FP16.
    """
    pairs = [(p.flatten(), p.grad.flatten()) for p in model.parameters() if p.grad is not None]
    weight, gradient = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    weight, update = weight[gradient != 0], -SMALL_RATE * gradient[gradient != 0]
    small = update.abs() < 2.0**-11 * weight.abs()
    return small.double().mean().item(), vanishes(weight, update).double().mean().item()


def vanishes(weight: Tensor, update: Tensor) -> Tensor:
    """Where adding an FP32 update to a weight stored in FP16 leaves it as it was (bool).

    So it is where the update is less than half the distance to the next FP16 number.
    """
    stored = weight.half()
    return (stored.float() + update).half() == stored


# -- report ----------------------------------------------------------------------------------------
# Verdicts and a table.


def _table(results: Results) -> Table:
    rows = [
        (
            arm,
            f"{statistics.fmean(one.before for one in outcomes):.4f}",
            " ".join(f"{one.after:.4f}" for one in outcomes),
            f"{statistics.fmean(one.small for one in outcomes):.1%}",
            f"{statistics.fmean(one.vanishing for one in outcomes):.1%}",
        )
        for arm, outcomes in results.items()
    ]
    columns = (
        "arm", "loss before", "loss after, by seed", "updates below 2^-11 of the weight",
        "updates that vanish in FP16",
    )  # fmt: skip
    return Table("Without master weights", columns, rows)


def verdicts(results: Results) -> dict[str, bool]:
    """Judged by progress, the fall of the held-out loss, against the FP32 run of the same seed."""
    ratios = {
        arm: [o.progress / full.progress for o, full in zip(outcomes, results[FP32], strict=True)]
        for arm, outcomes in results.items()
    }
    return {
        f"{MASTERS}: progress within 2% of FP32's": all(0.98 < x < 1.02 for x in ratios[MASTERS]),
        f"{HALF_WEIGHTS}: less than a quarter of FP32's progress": all(
            x < 0.25 for x in ratios[HALF_WEIGHTS]
        ),
    }
