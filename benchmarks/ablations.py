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
import functools
import itertools
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # started as a file: `python benchmarks/ablations.py`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from benchmarks.harness import RESULTS, Report, Settings, Table, environment
from mpcompile import loss_scale_of, mpcompile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEVICES = ("cpu",)
"""What FP16 can hold is the same everywhere; a GPU would only launch small kernels."""

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"

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

Results = dict[str, list["Outcome"]]
Loss = Callable[[Tensor, Tensor], Tensor]
Split = tuple[Tensor, Tensor]


def run(settings: Settings) -> Report:
    """Train everything; under `settings.quick` a few steps of one seed."""
    device = settings.device
    record = environment(device)
    seeds = range(1 if settings.quick else 3)
    first, second = (4, 4) if settings.quick else (8000, 600)
    stored = {arm: [train_stored(arm, seed, first, device) for seed in seeds] for arm in STORAGES}
    gradients = Magnitudes()
    scaled = {FP32: [train_scaled(FP32, seed, second, device, gradients) for seed in seeds]}
    for arm in SCALES:
        scaled[arm] = [train_scaled(arm, seed, second, device) for seed in seeds]
    return _Illustrated(
        name=f"ablations_{device.type}",
        title="What master weights and loss scaling are for",
        notes=[
            *(__doc__ or "").strip().split("\n\n")[1:],
            f"Steps: {first} and {second}, of {BATCH} images. Seeds: "
            f"{', '.join(map(str, seeds))}. Losses are over held-out digits, by an eager FP32 "
            "forward. Figure: docs/figures/ablations.svg.",
        ],
        tables=[
            _table("Without master weights", stored),
            _table("Without loss scaling", scaled),
            _lost_table(gradients),
        ],
        verdicts={**_stored_verdicts(stored), **_scaled_verdicts(scaled)},
        data={
            "master weights": _plain(stored),
            "loss scaling": _plain(scaled),
            "activation gradients, share by octave": gradients.shares(),
        },
        environment=record,
        draw=functools.partial(draw, stored=stored, scaled=scaled, gradients=gradients),
    )


# -- what FP16 loses ------------------------------------------------------------------------------


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

    def lost(self, scale: float) -> float:
        """The share that is zero in FP16 after multiplication by `scale`, a power of two.

        FP16's smallest number is 2^-24; what is below half of it rounds to zero.
        """
        limit = torch.finfo(torch.float16).smallest_normal * 2.0**-11 / scale
        kept = (share for octave, share in self.shares().items() if 2.0**octave >= limit)
        return 1 - sum(kept)


# -- training -------------------------------------------------------------------------------------


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


@functools.cache
def _digits(device: torch.device) -> tuple[Split, Split]:
    """(images (N, 64) in [0, 1], labels (N,)) to train on and to judge by, as in `parity`."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.3, stratify=labels, random_state=0)
    train_x, test_x, train_y, test_y = (torch.tensor(part).to(device) for part in split)
    return (train_x.float() / 16, train_y), (test_x.float() / 16, test_y)


def _batches(data: Split, seed: int, steps: int) -> Iterator[Split]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(data[0]), (BATCH,), generator=generator).to(data[0].device)
        yield data[0][chosen], data[1][chosen]


def _steps(
    model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, batches: Iterator[Split]
) -> Iterator[float]:
    """The training loop of plain PyTorch. Yields each loss while its gradients wait to be used."""
    for inputs, targets in batches:
        value = loss(model(inputs), targets)
        value.backward()
        yield value.item()
        optimizer.step()
        optimizer.zero_grad()


def _spans(values: Sequence[float], count: int = 40) -> list[float]:
    """Means over `count` equal spans, or fewer where there are fewer values."""
    size = max(1, len(values) // count)
    return [statistics.fmean(values[i : i + size]) for i in range(0, len(values), size)]


def _means(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(row[name] for row in measured) for name in measured[0]}


def _mixed(model: nn.Module, loss_scale: str | float) -> None:
    torch._dynamo.reset()  # each run compiles anew: no limit on recompilations is reached
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
    (train_x, train_y), (test_x, test_y) = _digits(device)
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
    before = _held_out(model, F.cross_entropy, test)
    losses, measured = [], []
    for value in _steps(model, F.cross_entropy, optimizer, _batches(train, seed, steps)):
        losses.append(value)
        measured.append(_update_shares(model))
    return Outcome(
        before=before,
        after=_held_out(model, F.cross_entropy, test),
        steps=steps,
        curve=_spans(losses),
        shares=_means(measured),
        skipped_steps=0 if arm == FP32 else loss_scale_of(model).skipped_steps,
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
    arm: str,
    seed: int,
    steps: int,
    device: torch.device = CPU,
    gradients: Magnitudes | None = None,
) -> Outcome:
    """Train the autoencoder; `arm` is `FP32` or one of `SCALES`.

    Args:
        gradients: is given those of all layers' outputs at every step. For FP32 only: hooks
            inside a compiled model would change where it rounds.
    """
    train, test = ((images, images) for images, _ in _digits(device))
    torch.manual_seed(seed)
    model = _perceptron(nn.Tanh, 64, 128, 64, 32, 16, 32, 64, 128, 64).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-12)
    if arm != FP32:
        _mixed(model, SCALES[arm])
    if gradients is not None:
        assert arm == FP32
        _watch(model, gradients.add)
    before = _held_out(model, F.mse_loss, test)
    losses, measured = [], []
    for value in _steps(model, _small_loss, optimizer, _batches(train, seed, steps)):
        losses.append(value / LOSS_WEIGHT)
        measured.append({"weight gradients zero": _zero_share(model)})
    return Outcome(
        before=before,
        after=_held_out(model, F.mse_loss, test),
        steps=steps,
        curve=_spans(losses),
        shares=_means(measured),
        skipped_steps=0 if arm == FP32 else loss_scale_of(model).skipped_steps,
    )


def _small_loss(output: Tensor, target: Tensor) -> Tensor:
    return LOSS_WEIGHT * F.mse_loss(output, target)


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


# -- the report -----------------------------------------------------------------------------------


def _plain(results: Results) -> dict[str, list[dict[str, object]]]:
    return {arm: [dataclasses.asdict(o) for o in outcomes] for arm, outcomes in results.items()}


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
    rows = [(f"{scale:g}", f"{gradients.lost(scale):.1%}") for scale in (1.0, 8.0, 128.0, 2.0**16)]
    return Table(
        "Gradients of layers' outputs that round to zero in FP16", ("loss scale", "share"), rows
    )


def _stored_verdicts(results: Results) -> dict[str, bool]:
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


def _scaled_verdicts(results: Results) -> dict[str, bool]:
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


# -- the figure -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Illustrated(Report):
    """A report with a figure; the one of the committed numbers lies in the documentation."""

    draw: Callable[[Path], None]

    def write(self, directory: Path) -> list[Path]:
        figure = (FIGURES if directory == RESULTS else directory) / "ablations.svg"
        figure.parent.mkdir(parents=True, exist_ok=True)
        self.draw(figure)
        return [*super().write(directory), figure]


def draw(path: Path, *, stored: Results, scaled: Results, gradients: Magnitudes) -> None:
    """Two sets of loss curves and the histogram between what FP16 holds and what it does not."""
    import matplotlib as mpl  # only this function needs it
    from matplotlib.figure import Figure

    # The same numbers give the same file.
    with mpl.rc_context({"svg.hashsalt": "ablations", "font.size": 9, "axes.titlesize": 10}):
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        first, second, third = figure.subplots(1, 3)
        first.set_title("FP16 weights lose small updates: training stalls")
        _curves(first, stored, "steps of SGD, learning rate 0.0005")
        first.set_ylabel("training loss, cross-entropy")
        second.set_title("Without loss scaling small gradients are lost")
        _curves(second, scaled, "steps of Adam")
        second.set_ylabel("training loss, mean squared error")
        second.set_yscale("log")
        third.set_title("Gradients of layers' outputs in FP32 training")
        _histogram(third, gradients)
        figure.savefig(path, metadata={"Date": None})


def _curves(axes: Axes, results: Results, label: str) -> None:
    """A line for each arm, the mean over its seeds, and a band from the least to the most."""
    for arm, outcomes in results.items():
        color, style, width = _LINES[arm]
        curves = torch.tensor([outcome.curve for outcome in outcomes])
        ends = torch.linspace(0, outcomes[0].steps, curves.shape[1] + 1)
        middles = (ends[1:] + ends[:-1]) / 2
        axes.plot(middles, curves.mean(0), style, color=color, linewidth=width, label=arm)
        axes.fill_between(middles, curves.amin(0), curves.amax(0), color=color, alpha=0.15)
    seeds = len(results[FP32])
    axes.set_xlabel(f"{label}; mean and range of {seeds} seeds")
    axes.legend(frameon=False)


# Color, style, width. FP32 is wide and pale, the others lie on top of it where they agree.
_LINES = {
    FP32: ("0.7", "-", 5.0),
    MASTERS: ("tab:blue", "-", 1.5),
    HALF_WEIGHTS: ("tab:red", "-", 1.5),
    UNSCALED: ("tab:red", "-", 1.5),
    "FP16, scale 8": ("tab:orange", "-", 1.5),
    "FP16, scale 128": ("tab:green", "--", 1.5),
    DYNAMIC: ("tab:blue", ":", 1.5),
}


def _histogram(axes: Axes, gradients: Magnitudes) -> None:
    shares = gradients.shares()
    axes.bar(
        [octave + 0.5 for octave in shares], [100 * x for x in shares.values()], 0.9, color="0.5"
    )
    axes.set_xlim(-46, 0)
    axes.set_xlabel("log2 of the magnitude; shaded: zero in FP16")
    axes.set_ylabel("share of all gradients, %")
    axes.axvspan(-46, -25, color="tab:red", alpha=0.12, linewidth=0)
    for exponent, what in ((-24, "smallest FP16 number"), (-14, "smallest normal FP16 number")):
        axes.axvline(exponent, color="tab:red", linestyle="--")
        axes.annotate(
            f"$2^{{{exponent}}}$: {what}", (exponent, 1), xycoords=("data", "axes fraction"),
            xytext=(3, -4), textcoords="offset points", rotation=90, va="top",
        )  # fmt: skip
    axes.annotate(
        f"zero in FP16:\n{gradients.lost(1):.0%} unscaled\n{gradients.lost(8):.0%} scaled by 8\n"
        f"{gradients.lost(128):.0%} scaled by 128",
        (0.02, 0.97), xycoords="axes fraction", va="top",
    )  # fmt: skip


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["run", "ablations", *sys.argv[1:]]))
