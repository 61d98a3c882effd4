"""The first steps in FP16: steps skipped until the loss scale fits, and what finding it costs.

By default the first backward finds the scale (`mpcompile/fit.py`); `loss_scale="grad_scaler"`
starts at 65536, as `torch.amp.GradScaler` does, and skips steps until the scale has come down to
where the gradients fit. Both train the same models, from the same weights on the same batches,
beside plain PyTorch in FP32: at O1 with a plain optimizer, and at O2 with an MPOptimizer. How far
apart two trainings drift that differ in nothing but roundings is shown by one more in FP32, whose
first weights are rounded to FP16.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: `python benchmarks/first_steps.py`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from benchmarks.harness import Report, Settings, Table, environment, idle_wait
from benchmarks.models import (
    GPT2,
    MLP,
    Attention,
    BERTEncoder,
    Detector,
    Recommender,
    Sample,
    Tagger,
    UNet,
    ViT,
    resnet18,
    resnet50,
)
from mpcompile import MPOptimizer, loss_scale_of, mpcompile
from mpcompile.demo import GPT, GPTConfig, corpus, text_batches
from mpcompile.state import fit

STEPS = 20
BATCHES = 4
"""Different ones; they come round again, so that there is something to learn."""
SHARE = 0.9
"""Of the models, that skip no step with the default scale."""

FOUND, FIXED = "dynamic", "grad_scaler"
FP32, ROUNDED = "FP32", "FP32, weights rounded"
LEVELS = ("O1", "O2")

MakeOptimizer = Callable[[Iterator[nn.Parameter]], Optimizer]
Prepare = Callable[[nn.Module, MakeOptimizer], tuple[nn.Module, Optimizer]]
Loss = Callable[..., Tensor]


@dataclasses.dataclass(frozen=True)
class Training:
    """A training loop: told how to prepare models and where they are, it yields its losses.

    Attributes:
        loop: `loop(prepare, device, steps)` draws weights and batches from torch's current seed.
    """

    name: str
    loop: Callable[[Prepare, torch.device, int], Iterator[Tensor]]


@dataclasses.dataclass(frozen=True)
class Run:
    """One training. A list has a number for each of its models.

    Attributes:
        first, last: the loss scale after the first step, and after the last.
        skipped: steps left out.
        again: forward and backward passes that the search ran beyond the ones asked for.
    """

    losses: list[float]
    first: list[float] = dataclasses.field(default_factory=list)
    last: list[float] = dataclasses.field(default_factory=list)
    skipped: list[int] = dataclasses.field(default_factory=list)
    again: int = 0


@dataclasses.dataclass(frozen=True)
class Work:
    """What is trained, and which of it is compiled to see what the search costs."""

    trainings: Sequence[Training]
    compiled: Sequence[Training]
    steps: int = STEPS
    emit: str = "aot_eager"
    compiler: str = "inductor"


# -- what is trained ------------------------------------------------------------------------------


def _of(
    name: str,
    build: Callable[[], nn.Module],
    draw: Callable[[], Sequence[Tensor]],
    optimizer: MakeOptimizer,
    loss: Loss | None = None,
) -> Training:
    """One model in the plainest loop.

    Args:
        draw: a batch.
        loss: `loss(model, *batch)`, outside of what is compiled; by default the model returns it.
    """

    def loop(prepare: Prepare, device: torch.device, steps: int) -> Iterator[Tensor]:
        model = build().to(device)
        batches = [[x.to(device) for x in draw()] for _ in range(min(steps, BATCHES))]
        model, optim = prepare(model, optimizer)
        for step in range(steps):
            batch = batches[step % BATCHES]
            optim.zero_grad()
            value = loss(model, *batch) if loss else model(*batch)
            value.backward()
            optim.step()
            yield value.detach()

    return Training(name, loop)


def _sampled(
    name: str, build: Callable[[], nn.Module], sample: Sample, optimizer: MakeOptimizer
) -> Training:
    """One of `benchmarks/models.py`, with random targets."""
    return _of(name, build, functools.partial(sample.draw, torch.device("cpu")), optimizer)


def _with(optimizer: Callable[..., Optimizer], **settings: Any) -> MakeOptimizer:
    return functools.partial(optimizer, **settings)


def _text(config: GPTConfig, batch: int) -> Callable[[], Sequence[Tensor]]:
    """Batches of the demo's text."""

    def draw() -> Sequence[Tensor]:
        seed = int(torch.randint(2**30, ()))
        return next(text_batches(corpus().train, batch=batch, context=config.context, seed=seed))

    return draw


class Autoencoder(nn.Module):
    """(B, 64) -> (B, 64) through 8 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.decoder(self.encoder(x))
        return result


class VAE(nn.Module):
    """PyTorch's VAE example, small: (B, 64) numbers from 0 to 1, and B draws of 8 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 128)
        self.mean, self.spread = nn.Linear(128, 8), nn.Linear(128, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.hidden(x))
        mean, spread = self.mean(h), self.spread(h)
        return self.decoder(mean + noise * torch.exp(0.5 * spread)), mean, spread


def _vae_loss(model: nn.Module, x: Tensor, noise: Tensor) -> Tensor:
    """Both sums are over the whole batch, as in the example."""
    again, mean, spread = model(x, noise)
    kept = F.binary_cross_entropy(again, x, reduction="sum")
    divergence: Tensor = -0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
    return kept + divergence


class Speech(nn.Module):
    """Two convolutions over time, (B, T, 40) frames -> (T, B, 32) log probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(40, 64, 5, padding=2), nn.Conv1d(64, 64, 5, padding=2)
        self.head = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first(x.transpose(1, 2)))))
        logits: Tensor = self.head(x.permute(2, 0, 1))
        return logits.log_softmax(-1)


def _ctc_loss(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    batch, frames, _ = x.shape
    spoken, written = (torch.full((batch,), n) for n in (frames, targets.shape[1]))
    return F.ctc_loss(model(x), targets, spoken, written)


class Towers(nn.Module):
    """Two towers whose pairs ought to agree (InfoNCE, a temperature of 0.07)."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1)
        return F.cross_entropy(a @ b.T / 0.07, torch.arange(len(x), device=x.device))


def _denoiser() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU(),
        nn.Conv2d(32, 3, 3, padding=1),
    )  # fmt: skip


def _tanh_net(inputs: int = 32, width: int = 64, outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


def _gan_models() -> tuple[nn.Module, nn.Module]:
    """DCGAN (Radford et al., 2016) for 16 x 16 images, initialised as in PyTorch's tutorial."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 4, bias=False), nn.Flatten(0), nn.Sigmoid(),
    )  # fmt: skip
    for module in (*generator, *discriminator):
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(module.weight, 0.0, 0.02)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.02)
    return generator, discriminator


def _gan(prepare: Prepare, device: torch.device, steps: int) -> Iterator[Tensor]:
    """The tutorial's loop; yields the sum of the three losses."""
    generator, discriminator = _gan_models()
    images = torch.rand(BATCHES, 16, 1, 16, 16, device=device) * 2 - 1
    noise = torch.randn(BATCHES, 16, 16, 1, 1, device=device)
    ones, zeros = torch.ones(16, device=device), torch.zeros(16, device=device)
    adam = _with(Adam, lr=2e-4, betas=(0.5, 0.999))
    g, optim_g = prepare(generator.to(device), adam)
    d, optim_d = prepare(discriminator.to(device), adam)
    for step in range(steps):
        optim_d.zero_grad()
        real = F.binary_cross_entropy(d(images[step % BATCHES]), ones)
        real.backward()
        made = g(noise[step % BATCHES])
        fake = F.binary_cross_entropy(d(made.detach()), zeros)
        fake.backward()
        optim_d.step()
        optim_g.zero_grad()
        fooled = F.binary_cross_entropy(d(made), ones)
        fooled.backward()
        optim_g.step()
        yield (real + fake + fooled).detach()


def _rows(*shape: int) -> Callable[[], Sequence[Tensor]]:
    return lambda: (torch.randn(shape),)


def _rows_and_targets(
    shape: tuple[int, ...], targets: tuple[int, ...], size: float = 1.0, at: float = 0.0
) -> Callable[[], Sequence[Tensor]]:
    return lambda: (torch.randn(shape), at + size * torch.randn(targets))


def _mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


_CONFIG = GPTConfig(vocab=256, context=32, width=64, layers=2, heads=2)
_small_gpt2 = functools.partial(
    GPT2, vocab=256, context=32, width=64, layers=2, heads=2, dropout=0.0, attention_dropout=0.0
)
_small_bert = functools.partial(
    BERTEncoder, vocab=256, context=32, width=64, layers=2, heads=2, dropout=0.0,
    attention_dropout=0.0,
)  # fmt: skip
_tokens = Sample((4, 32), (4, 32), 256, 256)

_GPT2 = _sampled("GPT-2, D64 L2", _small_gpt2, _tokens, _with(AdamW, lr=6e-4))
_RESNET18 = _sampled(
    "ResNet-18, 8 channels",
    functools.partial(resnet18, width=8),
    Sample((8, 3, 32, 32), (8,), 1000),
    _with(SGD, lr=0.01, momentum=0.9),
)
_MLP = _sampled("MLP, D64", MLP, Sample((64, 64), (64,), 10), _with(SGD, lr=0.1))

WORK = Work(
    trainings=(
        _of("GPT of the demo, D64 L2, text", functools.partial(GPT, _CONFIG), _text(_CONFIG, 4),
            _with(AdamW, lr=3e-4)),
        _GPT2,
        _sampled("BERT, D64 L2", _small_bert, Sample((4, 32), (4, 32), 2, 256),
                 _with(AdamW, lr=1e-4)),
        _sampled("ViT, D64 L2", functools.partial(
                     ViT, size=32, patch=8, width=64, layers=2, heads=2, classes=100),
                 Sample((8, 3, 32, 32), (8,), 100), _with(AdamW, lr=3e-4)),
        _of("Attention, mean square", functools.partial(Attention, 64, 2, causal=True),
            _rows_and_targets((4, 32, 64), (4, 32, 64)), _with(Adam, lr=1e-3), _mse),
        _RESNET18,
        _sampled("ResNet-50, 4 channels", functools.partial(resnet50, width=4),
                 Sample((8, 3, 32, 32), (8,), 1000), _with(SGD, lr=0.01, momentum=0.9)),
        _sampled("U-Net, 8 channels", functools.partial(UNet, width=8, levels=3),
                 Sample((2, 3, 32, 32), (2, 32, 32), 4), _with(Adam, lr=1e-3)),
        _sampled("Detector, 16 channels", functools.partial(Detector, width=16, classes=21),
                 Sample((2, 3, 16, 16), (2, Detector.places(16)), 21),
                 _with(SGD, lr=1e-3, momentum=0.9)),
        _of("Denoiser, mean square", _denoiser, _rows_and_targets((4, 3, 16, 16), (4, 3, 16, 16)),
            _with(AdamW, lr=1e-3), _mse),
        Training("DCGAN, two models", _gan),
        _MLP,
        _sampled("Recommender", functools.partial(Recommender, width=16),
                 Sample((32, 13), (32,), 2), _with(Adagrad, lr=1e-2)),
        _sampled("LSTM tagger, D64", Tagger, Sample((8, 16), (8, 16), 16, 256),
                 _with(Adam, lr=1e-2)),
        _of("Speech, CTC", Speech,
            lambda: (torch.randn(4, 50, 40), torch.randint(1, 32, (4, 10))),
            _with(AdamW, lr=1e-3), _ctc_loss),
        _of("Two towers, contrastive", Towers, lambda: (torch.randn(64, 64), torch.randn(64, 64)),
            _with(Adam, lr=1e-3)),
        _of("Autoencoder, summed squares", Autoencoder, _rows(64, 64), _with(Adam, lr=1e-3),
            lambda model, x: F.mse_loss(model(x), x, reduction="sum")),
        _of("VAE, summed over the batch", VAE, lambda: (torch.rand(64, 64), torch.randn(64, 8)),
            _with(Adam, lr=1e-3), _vae_loss),
        _of("Regression, targets around 1000", _tanh_net,
            _rows_and_targets((32, 32), (32, 1), size=100.0, at=1000.0),
            _with(RMSprop, lr=1e-2), _mse),
        _of("Two layers, SGD at a rate of 1", functools.partial(_tanh_net, 8, 16, 4),
            lambda: (torch.randn(32, 8), torch.randint(4, (32,))), _with(SGD, lr=1.0),
            lambda model, x, y: F.cross_entropy(model(x), y)),
    ),
    compiled=(_GPT2, _RESNET18, _MLP),
)  # fmt: skip

TINY = Work(
    trainings=(
        _sampled("MLP", functools.partial(MLP, inputs=8, width=8, layers=1),
                 Sample((4, 8), (4,), 10), _with(SGD, lr=0.1)),
        _of("Autoencoder, summed squares", Autoencoder, lambda: (3 * torch.randn(64, 64),),
            _with(Adam, lr=1e-3), lambda model, x: F.mse_loss(model(x), x, reduction="sum")),
        Training("DCGAN", _gan),
    ),
    compiled=(
        _sampled("MLP", functools.partial(MLP, inputs=8, width=8, layers=1),
                 Sample((4, 8), (4,), 10), _with(SGD, lr=0.1)),
    ),
    steps=2,
    emit="eager",
    compiler="eager",
)  # fmt: skip


# -- how ------------------------------------------------------------------------------------------


def run(settings: Settings) -> Report:
    """Train everything; under `settings.quick` three small models for two steps."""
    work = TINY if settings.quick else WORK
    record = environment(settings.device)
    runs = {t.name: train_all(t, work, settings.device) for t in work.trainings}
    costs = {t.name: _cost(t, work.compiler, settings.device) for t in work.compiled}
    return Report(
        name=f"first_steps_{settings.device.type}",
        title="The first steps in FP16",
        notes=_notes(work),
        tables=[
            *(_table(level, runs) for level in LEVELS), _again_table(runs), _cost_table(costs)
        ],
        verdicts=_verdicts(runs, work.steps),
        data={
            "steps": work.steps,
            "runs": {
                name: {arm: dataclasses.asdict(one) for arm, one in group.items()}
                for name, group in runs.items()
            },
            "loss_difference": {
                name: {arm: difference(group, arm) for arm in group} for name, group in runs.items()
            },
            "search": costs,
        },
        environment=record,
    )  # fmt: skip


def arm(level: str, scale: str) -> str:
    return f"{level}, {scale}"


def train_all(training: Training, work: Work, device: torch.device) -> dict[str, Run]:
    """The same training in FP32, twice, and at each level with each way to start."""
    found = {
        name: _train(training, {"round": name == ROUNDED}, work, device) for name in (FP32, ROUNDED)
    }
    for level in LEVELS:
        for scale in (FOUND, FIXED):
            options = {"level": level, "loss_scale": scale}
            found[arm(level, scale)] = _train(training, options, work, device)
    return found


def _train(training: Training, options: Mapping[str, Any], work: Work, device: torch.device) -> Run:
    torch._dynamo.reset()
    torch.manual_seed(0)
    prepare, models = _preparing(options, work.emit)
    losses: list[float] = []
    first: list[float] = []
    with search() as spent:
        for loss in training.loop(prepare, device, work.steps):
            losses.append(float(loss))
            first = first or [loss_scale_of(model).value for model in models]
    scales = [loss_scale_of(model) for model in models]
    last, skipped = [s.value for s in scales], [s.skipped_steps for s in scales]
    return Run(losses, first, last, skipped, spent.again)


def _preparing(options: Mapping[str, Any], emit: str) -> tuple[Prepare, list[nn.Module]]:
    """What a loop calls on its models, and those that were compiled.

    Args:
        options: for `mpcompile()`; without a level the model stays as it is, but for `round`.
    """
    models: list[nn.Module] = []

    def prepare(model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        if "level" not in options:
            for p in model.parameters() if options["round"] else ():
                p.data = p.data.half().float()
            return model, make(model.parameters())
        mpcompile(model, dtype=torch.float16, emit=emit, strict=True, **options)
        models.append(model)
        optimizer = make(model.parameters())
        return model, MPOptimizer(optimizer, emit="eager") if options[
            "level"
        ] == "O2" else optimizer

    return prepare, models


@dataclasses.dataclass
class Search:
    """What searching has taken: runs of forward and backward, and seconds."""

    again: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def search() -> Iterator[Search]:
    """Count what is run beyond the one forward and backward that were asked for."""
    spent, asked = Search(), [0.0]
    again, backward, find = (getattr(fit._Trial, n) for n in ("again", "backward", "find"))

    def count_again(*args: Any) -> Any:
        spent.again += 1
        return again(*args)

    def time_backward(*args: Any) -> Any:
        start = time.perf_counter()
        result = backward(*args)
        asked.append(time.perf_counter() - start)
        return result

    def time_find(*args: Any) -> Any:
        asked.clear()
        start = time.perf_counter()
        result = find(*args)
        spent.seconds += time.perf_counter() - start - asked[0]
        return result

    with unittest.mock.patch.multiple(
        fit._Trial, again=count_again, backward=time_backward, find=time_find
    ):
        yield spent


def _cost(training: Training, compiler: str, device: torch.device) -> dict[str, float]:
    """Seconds of a first step with empty caches, and of them the search; O1."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    prepare, _ = _preparing({"level": "O1", "loss_scale": FOUND}, compiler)
    wait = idle_wait(device)
    with fresh_cache(), search() as spent:
        steps = training.loop(prepare, device, 2)
        start = time.perf_counter()
        next(steps)
        wait()
        first = time.perf_counter() - start
        start = time.perf_counter()
        next(steps)
        wait()
        second = time.perf_counter() - start
    return {"first": first, "search": spent.seconds, "again": spent.again, "second": second}


def difference(group: Mapping[str, Run], arm: str) -> float:
    """The largest difference of a loss to FP32's, relative to that."""
    pairs = zip(group[arm].losses, group[FP32].losses, strict=True)
    return max(abs(ours - full) / abs(full) for ours, full in pairs)


# -- tables ---------------------------------------------------------------------------------------


def _notes(work: Work) -> list[str]:
    one, *others = (__doc__ or "").strip().split("\n\n")[1:]
    return [
        one,
        *others,
        f"{work.steps} steps on {BATCHES} batches that come round; random weights and, but for the "
        f"text, random data. `emit={work.emit!r}`: the rewritten graph, operator by operator. "
        "The difference is the largest one of a loss to that of the same step in FP32, relative "
        "to it; the last column is that of the rounded weights in FP32. With two models the "
        "numbers are of the generator / the discriminator.",
        "More runs: forward and backward passes of a graph beyond the ones asked for, over all "
        "steps (the search ends with the first). Seconds: one cold first step at O1, optimizer "
        f"included, with `emit={work.compiler!r}` and empty caches.",
    ]


def _numbers(values: Sequence[float]) -> str:
    return " / ".join(f"{value:g}" for value in values)


def _table(level: str, runs: Mapping[str, Mapping[str, Run]]) -> Table:
    rows = []
    for name, group in runs.items():
        cells = [name]
        for scale in (FOUND, FIXED):
            one = group[arm(level, scale)]
            cells += [
                _numbers(one.first), _numbers(one.last), _numbers(one.skipped),
                f"{difference(group, arm(level, scale)):.2%}",
            ]  # fmt: skip
        rows.append([*cells, f"{difference(group, ROUNDED):.2%}"])
    columns = ("scale after 1", "after all", "skipped", "loss off by")
    ways = (f"{how}: {column}" for how in ("found", "65536") for column in columns)
    how = "a plain optimizer" if level == "O1" else "MPOptimizer"
    return Table(f"{level} with {how}", ("model", *ways, "FP32 off by"), rows)


def _again_table(runs: Mapping[str, Mapping[str, Run]]) -> Table:
    rows = [
        (name, *(str(group[arm(level, FOUND)].again) for level in LEVELS))
        for name, group in runs.items()
    ]
    return Table("What the search runs", ("model", *(f"{x}: more runs" for x in LEVELS)), rows)


def _cost_table(costs: Mapping[str, Mapping[str, float]]) -> Table:
    rows = [
        (name, f"{one['first']:.1f}", str(one["again"]), f"{one['search']:.3f}",
         f"{one['search'] / one['first']:.2%}", f"{one['second']:.3f}")
        for name, one in costs.items()
    ]  # fmt: skip
    columns = ("model", "first step, s", "more runs", "of it the search, s", "share", "2nd step, s")
    return Table("What the search costs, beside a cold compile", columns, rows)


def _verdicts(runs: Mapping[str, Mapping[str, Run]], steps: int) -> dict[str, bool]:
    verdicts = {}
    for level in LEVELS:
        calm = sum(not any(group[arm(level, FOUND)].skipped) for group in runs.values())
        claim = f"{level}: no step of the first {steps} is skipped for {SHARE:.0%} of the models"
        verdicts[f"{claim}: {calm} of {len(runs)}"] = calm >= SHARE * len(runs)
    return verdicts


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["run", "first_steps", *sys.argv[1:]]))
