"""Why FP16 training needs FP32 master weights and loss scaling, one left out at a time.

Both are the ablations of "Mixed Precision Training" (Micikevicius et al., ICLR 2018, sections 3.1
and 3.2), made small: perceptrons on scikit-learn's digits, plain torch.optim, the same seeds and
the same batches for every arm.

*Master weights.* A classifier learns with SGD and a small learning rate, so that most updates are
less than 2^-11 of their weight. An FP16 number has 11 significant bits: adding such an update
rounds back to the weight. The two FP16 arms differ in one thing, whether weights are rounded to
FP16 when training starts and after each update. The update itself is computed in FP32 in both.

*Loss scaling.* An autoencoder learns with Adam; its loss, a mean over 2^13 outputs, is multiplied
by 2^-11. That makes gradients as small as a mean over 2^24 outputs does (64 images of 512 x 512
pixels), or as a side loss of small weight. Adam does not care how large a gradient is, but a zero
stays zero. Its epsilon is 1e-12: the default is larger than many of these gradients, even in FP32.
The histogram is of the gradients of all layers' outputs, in the FP32 runs. From it follows what
share FP16 rounds to zero: all those below 2^-25 over the loss scale.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.digits import Split, digits
from benchmarks.harness.report import Report, Settings, Table, paragraphs, plain
from benchmarks.harness.timing import spans
from mpcompile import loss_scale_of, mpcompile

DEVICES = ("cpu",)
"""What FP16 can hold is the same everywhere; a GPU would only launch small kernels."""


def run(settings: Settings) -> Report:
    """Train everything; under `settings.quick` a few steps of one seed."""
    device = settings.device
    seeds = range(1 if settings.quick else 3)
    first, second = (4, 4) if settings.quick else (8000, 600)
    stored = {arm: [train_stored(arm, seed, first, device) for seed in seeds] for arm in STORAGES}
    gradients = Magnitudes()
    scaled = {FP32: [train_scaled(FP32, seed, second, device, gradients) for seed in seeds]}
    for arm in SCALES:
        scaled[arm] = [train_scaled(arm, seed, second, device) for seed in seeds]
    notes = [
        *paragraphs(__doc__),
        f"Steps: {first} and {second}, of {BATCH} images. Seeds: "
        f"{', '.join(map(str, seeds))}. Losses are over held-out digits, by an eager FP32 "
        "forward. Figure: docs/figures/ablations.svg, which `python -m benchmarks.figures` draws.",
    ]
    return Report(
        title="What master weights and loss scaling are for",
        notes=notes,
        tables=[
            _table("Without master weights", stored),
            _table("Without loss scaling", scaled),
            _lost_table(gradients),
        ],
        verdicts={**stored_verdicts(stored), **scaled_verdicts(scaled)},
        data={
            "master weights": plain(stored),
            "loss scaling": plain(scaled),
            "activation gradients, share by octave": gradients.shares(),
        },
    )


# -- trainings -------------------------------------------------------------------------------------
# The two ablations: trainings that differ in where weights are stored, or in the loss scale.

CPU = torch.device("cpu")

FP32 = "FP32"
MASTERS, HALF_WEIGHTS = "FP16, FP32 master weights", "FP16, FP16 weights"
STORAGES = (FP32, MASTERS, HALF_WEIGHTS)

UNSCALED, DYNAMIC = "FP16, no loss scale", "FP16, dynamic scale"
SCALES: dict[str, str | float] = {
    UNSCALED: "none",
    "FP16, scale 8": 8.0,  # the paper's, for its SSD detector
    "FP16, scale 128": 128.0,
    DYNAMIC: "dynamic",
}

BATCH = 128
SMALL_RATE = 5e-4
LOSS_WEIGHT = 2.0**-11

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        before, after: loss over held-out digits, by an eager FP32 forward; without `LOSS_WEIGHT`.
        steps: of the optimizer.
        curve: training loss, means over equal spans of the steps; without `LOSS_WEIGHT`.
        shares: what was measured: name -> mean over the steps, between 0 and 1.
        skipped_steps: because of an overflow.
    """

    before: float
    after: float
    steps: int
    curve: list[float]
    shares: dict[str, float]
    skipped_steps: int = 0

    @property
    def progress(self) -> float:
        return self.before - self.after


Results = dict[str, list[Outcome]]
"""Arm -> an outcome for each seed."""


def _batches(data: Split, seed: int, steps: int) -> Iterator[Split]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(data[0]), (BATCH,), generator=generator).to(data[0].device)
        yield data[0][chosen], data[1][chosen]


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batches: Iterator[Split],
    test: Split,
    *,
    weight: float = 1.0,
    shares: Callable[[nn.Module], Mapping[str, float]],
    scaled: bool,
) -> Outcome:
    """The training loop of plain PyTorch; `before` and `after` are of the data in `test`.

    Args:
        weight: of the loss in training.
        shares: what is measured in each step while its gradients wait to be used.
        scaled: whether there is a loss scale, whose skipped steps count.
    """
    before = _held_out(model, loss, test)
    losses: list[float] = []
    measured: list[Mapping[str, float]] = []
    for inputs, targets in batches:
        value = weight * loss(model(inputs), targets)
        value.backward()
        losses.append(value.item() / weight)
        measured.append(shares(model))
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(
        before=before,
        after=_held_out(model, loss, test),
        steps=len(losses),
        curve=spans(losses, 40),
        shares={name: statistics.fmean(one[name] for one in measured) for name in measured[0]},
        skipped_steps=loss_scale_of(model).skipped_steps if scaled else 0,
    )


def _mixed(model: nn.Module, loss_scale: str | float) -> None:
    torch._dynamo.reset()  # each run compiles again: no limit on recompilations is reached
    # `eager` rounds exactly where the plan says so; a fused kernel may keep FP32 between.
    mpcompile(
        model, dtype=torch.float16, level="O1", loss_scale=loss_scale, emit="eager", strict=True
    )


@torch.no_grad()
def _held_out(model: nn.Module, loss: Loss, data: Split) -> float:
    return loss(model.forward(data[0]), data[1]).item()


# -- the first ablation: where weights are stored -------------------------------------------------


def train_stored(arm: str, seed: int, steps: int, device: torch.device = CPU) -> Outcome:
    """Train the classifier; `arm` is one of `STORAGES`."""
    (train_x, train_y), (test_x, test_y) = digits(device)
    mean, deviation = train_x.mean(), train_x.std()
    train, test = ((train_x - mean) / deviation, train_y), ((test_x - mean) / deviation, test_y)
    torch.manual_seed(seed)
    model = _perceptron(nn.ReLU, 64, 128, 128, 10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=SMALL_RATE)
    if arm != FP32:
        _mixed(model, "dynamic")
    if arm == HALF_WEIGHTS:
        _store_in_half(model)
        optimizer.register_step_post_hook(lambda *_: _store_in_half(model))
    return _train(
        model,
        optimizer,
        F.cross_entropy,
        _batches(train, seed, steps),
        test,
        shares=_update_shares,
        scaled=arm != FP32,
    )


def _perceptron(activation: type[nn.Module], *widths: int) -> nn.Sequential:
    layers = [(nn.Linear(a, b), activation()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*list(itertools.chain(*layers))[:-1])


@torch.no_grad()
def _store_in_half(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.half())


@torch.no_grad()
def _update_shares(model: nn.Module) -> dict[str, float]:
    """Of the updates that are not zero in FP32: two shares, as if all weights were FP16."""
    pairs = [(p.flatten(), p.grad.flatten()) for p in model.parameters() if p.grad is not None]
    weight, gradient = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    weight, update = weight[gradient != 0], -SMALL_RATE * gradient[gradient != 0]
    small = update.abs() < 2.0**-11 * weight.abs()
    return {
        "updates below 2^-11 of the weight": small.double().mean().item(),
        "updates that vanish in FP16": vanishes(weight, update).double().mean().item(),
    }


# -- the second ablation: the loss scale ----------------------------------------------------------


def train_scaled(
    arm: str, seed: int, steps: int, device: torch.device = CPU, gradients: Magnitudes | None = None
) -> Outcome:
    """Train the autoencoder; `arm` is `FP32` or one of `SCALES`.

    Args:
        gradients: is given those of all layers' outputs at every step. For FP32 only: hooks
            inside a compiled model would change where it rounds.
    """
    train, test = ((images, images) for images, _ in digits(device))
    torch.manual_seed(seed)
    model = _perceptron(nn.Tanh, 64, 128, 64, 32, 16, 32, 64, 128, 64).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-12)
    if arm != FP32:
        _mixed(model, SCALES[arm])
    if gradients is not None:
        assert arm == FP32
        _watch(model, gradients.add)
    return _train(
        model,
        optimizer,
        F.mse_loss,
        _batches(train, seed, steps),
        test,
        weight=LOSS_WEIGHT,
        shares=lambda model: {"weight gradients zero": _zero_share(model)},
        scaled=arm != FP32,
    )


def _watch(model: nn.Sequential, see: Callable[[Tensor], object]) -> None:
    """Call `see` with the gradient of each linear layer's output, in every backward."""

    def note(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(see)

    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(note)


def _zero_share(model: nn.Module) -> float:
    gradients = [p.grad for p in model.parameters() if p.grad is not None and p.dim() == 2]
    zeros = sum(int((gradient == 0).sum()) for gradient in gradients)
    return zeros / sum(gradient.numel() for gradient in gradients)


# -- fp16 ------------------------------------------------------------------------------------------
# What FP16 loses: updates that round away, values that round to zero.


def vanishes(weight: Tensor, update: Tensor) -> Tensor:
    """Where adding an FP32 update to a weight stored in FP16 leaves it as it was (bool).

    So it is where the update is less than half the distance to the next FP16 number.
    """
    stored = weight.half()
    return (stored.float() + update).half() == stored


class Magnitudes:
    """How many values were seen in each octave: `counts[k]` of 2^k <= |x| < 2^(k+1)."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.zeros = 0

    def add(self, values: Tensor) -> None:
        octaves = torch.frexp(values[values != 0]).exponent - 1
        self.zeros += values.numel() - octaves.numel()
        found, counts = octaves.unique(return_counts=True)
        self.counts.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))

    def shares(self) -> dict[int, float]:
        """Octave -> share of all values, zeros included in "all"."""
        total = self.counts.total() + self.zeros
        return {octave: count / total for octave, count in sorted(self.counts.items())}


def lost(shares: Mapping[int, float], scale: float) -> float:
    """The share that is zero in FP16 after multiplication by `scale`, a power of two.

    FP16's smallest number is 2^-24; what is below half of it rounds to zero.

    Args:
        shares: as `Magnitudes.shares` returns them.
    """
    limit = torch.finfo(torch.float16).smallest_normal * 2.0**-11 / scale
    return 1 - sum(share for octave, share in shares.items() if 2.0**octave >= limit)


# -- report ----------------------------------------------------------------------------------------
# Verdicts and tables.


def _table(title: str, results: Results) -> Table:
    names = list(results[FP32][0].shares)
    rows = [
        (
            arm,
            f"{statistics.fmean(outcome.before for outcome in outcomes):.4f}",
            " ".join(f"{outcome.after:.4f}" for outcome in outcomes),
            *(f"{statistics.fmean(o.shares[name] for o in outcomes):.1%}" for name in names),
            " ".join(str(outcome.skipped_steps) for outcome in outcomes),
        )
        for arm, outcomes in results.items()
    ]
    columns = ("arm", "loss before", "loss after, by seed", *names, "skipped steps")
    return Table(title, columns, rows)


def _lost_table(gradients: Magnitudes) -> Table:
    shares, scales = gradients.shares(), (1.0, 8.0, 128.0, 2.0**16)
    rows = [(f"{scale:g}", f"{lost(shares, scale):.1%}") for scale in scales]
    return Table(
        "Gradients of layers' outputs that round to zero in FP16", ("loss scale", "share"), rows
    )


def stored_verdicts(results: Results) -> dict[str, bool]:
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


def scaled_verdicts(results: Results) -> dict[str, bool]:
    """Judged by the held-out loss in the end, against the FP32 run of the same seed."""
    ratios = {
        arm: [o.after / full.after for o, full in zip(outcomes, results[FP32], strict=True)]
        for arm, outcomes in results.items()
    }
    return {
        f"{UNSCALED}: at least twice the loss of FP32": all(x > 2 for x in ratios[UNSCALED]),
        **{
            f"{arm}: loss within 10% of FP32's": all(0.9 < x < 1.1 for x in ratios[arm])
            for arm in SCALES
            if arm != UNSCALED
        },
    }
