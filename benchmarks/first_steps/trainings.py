"""What is trained: models, their data, optimizers and loops."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from benchmarks import models
from benchmarks.first_steps.deep import DEEP, SHALLOW, Deep
from mpcompile.demo import GPT, GPTConfig, corpus, text_batches

# -- models ----------------------------------------------------------------------------------------
# Models and losses that only this benchmark trains. B examples each.


def autoencoder() -> nn.Module:
    """(B, 64) -> (B, 64) through 8 numbers."""
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8),
        nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64),
    )  # fmt: skip


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


def vae_loss(model: nn.Module, x: Tensor, noise: Tensor) -> Tensor:
    """Of (B, 64) numbers and (B, 8) noise; both sums run over the whole batch, as they do there."""
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


def ctc_loss(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """Of (B, T, 40) frames and (B, L) letters, all of their full length."""
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


def denoiser() -> nn.Module:
    """Three convolutions with group norms, (B, 3, H, W) -> (B, 3, H, W)."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU(),
        nn.Conv2d(32, 3, 3, padding=1),
    )  # fmt: skip


def tanh_net(inputs: int = 32, width: int = 64, outputs: int = 1) -> nn.Module:
    """Two linear layers, (B, inputs) -> (B, outputs)."""
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


# -- trainings -------------------------------------------------------------------------------------

STEPS = 20
BATCHES = 4
"""Different ones; they come round again, so that there is something to learn."""

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
class Work:
    """What is trained, which of it is compiled to see what the search costs, and what else is."""

    trainings: Sequence[Training]
    compiled: Sequence[Training]
    deep: Deep
    steps: int = STEPS
    emit: str = "aot_eager"
    compiler: str = "inductor"


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
    name: str, build: Callable[[], nn.Module], sample: models.Sample, optimizer: MakeOptimizer
) -> Training:
    """One of `benchmarks/models`, with random targets."""
    return _of(name, build, functools.partial(sample.draw, torch.device("cpu")), optimizer)


_with = functools.partial


def _text(config: GPTConfig, batch: int) -> Callable[[], Sequence[Tensor]]:
    """Batches of the demo's text."""

    def draw() -> Sequence[Tensor]:
        seed = int(torch.randint(2**30, ()))
        return next(text_batches(corpus(), batch=batch, context=config.context, seed=seed))

    return draw


def _gan(prepare: Prepare, device: torch.device, steps: int) -> Iterator[Tensor]:
    """PyTorch's tutorial on DCGAN, for images of 16 x 16; yields the sum of the three losses."""
    made = models.Generator(noise=16, width=16, levels=2, channels=1)
    generator, judge = map(
        models.drawn_as_dcgan, (made, models.Discriminator(width=16, levels=2, channels=1))
    )
    discriminator = nn.Sequential(judge, nn.Sigmoid())
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
_small_gpt2 = functools.partial(models.GPT2, vocab=256, context=32, width=64, layers=2, heads=2)
_small_bert = functools.partial(
    models.BERTEncoder, vocab=256, context=32, width=64, layers=2, heads=2
)  # fmt: skip
_tokens = models.Sample((4, 32), (4, 32), 256, 256)

_GPT2 = _sampled("GPT-2, D64 L2", _small_gpt2, _tokens, _with(AdamW, lr=6e-4))
_RESNET18 = _sampled(
    "ResNet-18, 8 channels",
    functools.partial(models.resnet18, width=8),
    models.Sample((8, 3, 32, 32), (8,), 1000),
    _with(SGD, lr=0.01, momentum=0.9),
)
_MLP = _sampled("MLP, D64", models.MLP, models.Sample((64, 64), (64,), 10), _with(SGD, lr=0.1))

WORK = Work(
    trainings=(
        _of("GPT of the demo, D64 L2, text", functools.partial(GPT, _CONFIG), _text(_CONFIG, 4),
            _with(AdamW, lr=3e-4)),
        _GPT2,
        _sampled("BERT, D64 L2", _small_bert, models.Sample((4, 32), (4, 32), 2, 256),
                 _with(AdamW, lr=1e-4)),
        _sampled("ViT, D64 L2", functools.partial(
                     models.ViT, size=32, patch=8, width=64, layers=2, heads=2, classes=100),
                 models.Sample((8, 3, 32, 32), (8,), 100), _with(AdamW, lr=3e-4)),
        _of("Attention, mean square", functools.partial(models.Attention, 64, 2, causal=True),
            _rows_and_targets((4, 32, 64), (4, 32, 64)), _with(Adam, lr=1e-3), _mse),
        _RESNET18,
        _sampled("ResNet-50, 4 channels", functools.partial(models.resnet50, width=4),
                 models.Sample((8, 3, 32, 32), (8,), 1000), _with(SGD, lr=0.01, momentum=0.9)),
        _sampled("U-Net, 8 channels", functools.partial(models.UNet, width=8, levels=3),
                 models.Sample((2, 3, 32, 32), (2, 32, 32), 4), _with(Adam, lr=1e-3)),
        _sampled("Detector, 16 channels", functools.partial(models.Detector, width=16, classes=21),
                 models.Sample((2, 3, 16, 16), (2, models.Detector.places(16)), 21),
                 _with(SGD, lr=1e-3, momentum=0.9)),
        _of("Denoiser, mean square", denoiser, _rows_and_targets((4, 3, 16, 16), (4, 3, 16, 16)),
            _with(AdamW, lr=1e-3), _mse),
        Training("DCGAN, two models", _gan),
        _MLP,
        _sampled("Recommender", functools.partial(models.Recommender, width=16),
                 models.Sample((32, 13), (32,), 2), _with(Adagrad, lr=1e-2)),
        _sampled("LSTM tagger, D64", models.Tagger, models.Sample((8, 16), (8, 16), 16, 256),
                 _with(Adam, lr=1e-2)),
        _of("Speech, CTC", Speech,
            lambda: (torch.randn(4, 50, 40), torch.randint(1, 32, (4, 10))),
            _with(AdamW, lr=1e-3), ctc_loss),
        _of("Two towers, contrastive", Towers, lambda: (torch.randn(64, 64), torch.randn(64, 64)),
            _with(Adam, lr=1e-3)),
        _of("Autoencoder, summed squares", autoencoder, _rows(64, 64), _with(Adam, lr=1e-3),
            lambda model, x: F.mse_loss(model(x), x, reduction="sum")),
        _of("VAE, summed over the batch", VAE, lambda: (torch.rand(64, 64), torch.randn(64, 8)),
            _with(Adam, lr=1e-3), vae_loss),
        _of("Regression, targets around 1000", tanh_net,
            _rows_and_targets((32, 32), (32, 1), size=100.0, at=1000.0),
            _with(RMSprop, lr=1e-2), _mse),
        _of("Two layers, SGD at a rate of 1", functools.partial(tanh_net, 8, 16, 4),
            lambda: (torch.randn(32, 8), torch.randint(4, (32,))), _with(SGD, lr=1.0),
            lambda model, x, y: F.cross_entropy(model(x), y)),
    ),
    compiled=(_GPT2, _RESNET18, _MLP),
    deep=DEEP,
)  # fmt: skip

_TINY_MLP = _sampled("MLP", functools.partial(models.MLP, inputs=8, width=8, layers=1),
                     models.Sample((4, 8), (4,), 10), _with(SGD, lr=0.1))  # fmt: skip
TINY = Work(
    trainings=(
        _TINY_MLP,
        _of("Autoencoder, summed squares", autoencoder, lambda: (3 * torch.randn(64, 64),),
            _with(Adam, lr=1e-3), lambda model, x: F.mse_loss(model(x), x, reduction="sum")),
        Training("DCGAN", _gan),
    ),
    compiled=(_TINY_MLP,),
    deep=SHALLOW,
    steps=2,
    emit="eager",
    compiler="eager",
)  # fmt: skip
