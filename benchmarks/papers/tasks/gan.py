"""Images: a DCGAN that makes digits.

"Unsupervised Representation Learning with Deep Convolutional Generative Adversarial Networks"
(Radford et al., 2015): transposed convolutions with batch norm and ReLU in the generator, strided
ones with leaky ReLU in the discriminator, weights drawn with a deviation of 0.02, Adam with a first
moment of 0.5; its learning rate is 4e-3, as the nets are narrow and the steps few. What is judged
is an average of the generator's weights over the steps, as is usual.

The distance between what it makes and held-out digits is that of Frechet between two Gaussians
("GANs Trained by a Two Time-Scale Update Rule", Heusel et al., 2017), here of the features of a
classifier that learned these digits in FP32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.digits import digits
from benchmarks.harness.ways import Trainer
from benchmarks.models import Discriminator, Generator, drawn_as_dcgan
from benchmarks.papers.task import Metrics, Task

BATCH = 64
NOISE = 32
DECAY = 0.99
"""Of the average of the generator's weights, per step."""
MADE = 2160
"""Images that are judged: four for each one held out."""


def _generator() -> nn.Module:
    """Noise (B, 32, 1, 1) -> images (B, 1, 8, 8) from -1 to 1."""
    return drawn_as_dcgan(Generator(noise=NOISE, width=16, levels=2, channels=1, first=2))


@functools.cache
def _images(device: torch.device) -> tuple[Tensor, Tensor]:
    """(N, 1, 8, 8) from -1 to 1: to train on, and held out."""
    return tuple(2 * x.reshape(-1, 1, 8, 8) - 1 for x, _ in digits(device))  # type: ignore[return-value]


class _Training:
    def __init__(self, trainer: Trainer, seed: int) -> None:
        self._trainer, self._device = trainer, trainer.device
        self._generator = trainer.model(_generator())
        self._discriminator = trainer.model(
            drawn_as_dcgan(Discriminator(width=16, levels=2, channels=1, last=2))
        )
        self._average = _plain(self._generator, _generator())
        adam = functools.partial(torch.optim.Adam, lr=4e-3, betas=(0.5, 0.999))
        self._makes = trainer.optimizer(adam, [*self._generator.parameters()])
        self._tells = trainer.optimizer(adam, [*self._discriminator.parameters()])
        self._batches = self._draw(seed)
        self._update = trainer.whole(self._train)

    def _draw(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        images = _images(self._device)[0]
        generator = torch.Generator().manual_seed(seed)
        while True:
            for chosen in torch.randperm(len(images), generator=generator).split(BATCH)[:-1]:
                noise = torch.randn(BATCH, NOISE, 1, 1, generator=generator)
                yield images[chosen], noise.to(self._device)

    def step(self) -> Tensor:
        loss = self._update(*next(self._batches))
        self._remember()
        return loss

    def _train(self, real: Tensor, noise: Tensor) -> Tensor:
        trainer = self._trainer
        with trainer.forward():
            truth = _loss(self._discriminator(real), 1.0)
        trainer.backward(truth)
        with trainer.forward():
            made = self._generator(noise)
            lies = _loss(self._discriminator(made.detach()), 0.0)
        trainer.backward(lies)
        trainer.step(self._tells)
        with trainer.forward():
            fooled = _loss(self._discriminator(made), 1.0)
        trainer.backward(fooled)
        trainer.step(self._makes)
        self._tells.zero_grad()  # of what the generator's loss left there
        trainer.done()
        return (truth + lies + fooled).detach()

    @torch.no_grad()
    def _remember(self) -> None:
        trained = self._generator.state_dict()
        for name, value in self._average.state_dict().items():
            if value.is_floating_point():
                value.lerp_(trained[name], 1 - DECAY)

    @torch.no_grad()
    def judge(self) -> Metrics:
        held_out = _images(self._device)[1]
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(MADE, NOISE, 1, 1, generator=generator).to(self._device)
        self._average.eval()
        made = self._average(noise)
        self._discriminator.eval()
        truth = _loss(self._discriminator.forward(held_out), 1.0)
        lies, fooled = (_loss(self._discriminator.forward(made), real) for real in (0.0, 1.0))
        self._discriminator.train()
        features = _classifier(self._device)[:-1]
        distance = frechet_distance(features(held_out).double(), features(made).double())
        return {
            "Frechet distance": distance,
            "discriminator's loss": (truth + lies).item(),
            "generator's loss": fooled.item(),
        }


def _plain(trained: nn.Module, fresh: nn.Module) -> nn.Module:
    """A module that is not compiled, with the weights of one that may be."""
    fresh.load_state_dict(trained.state_dict())
    return fresh.to(next(trained.parameters()).device)


def _loss(logits: Tensor, real: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


@functools.cache
def _classifier(device: torch.device) -> nn.Sequential:
    """Images -> logits (B, 10); without its last layer, features (B, 32). Always the same one."""
    (_, labels), _ = digits(device)
    images, _ = _images(device)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
            nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
        ).to(device)  # fmt: skip
        optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
        for _ in range(15):
            for chosen in torch.randperm(len(images)).split(64):
                F.cross_entropy(net(images[chosen]), labels[chosen]).backward()
                optimizer.step()
                optimizer.zero_grad()
    return net.requires_grad_(False)


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Between Gaussians of the means and covariances of two sets of features, (N, D) in FP64.

    |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)). The trace of the root is the sum of the roots of
    the eigenvalues of C1^(1/2) C2 C1^(1/2), which is symmetric. NaN where a feature is not finite.
    """
    if not (first.isfinite().all() and second.isfinite().all()):
        return float("nan")
    means = (first.mean(0) - second.mean(0)).square().sum()
    one, two = (torch.atleast_2d(features.T.cov()) for features in (first, second))
    values, vectors = torch.linalg.eigh(one)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    shared = torch.linalg.eigvalsh(root @ two @ root).clamp(min=0).sqrt().sum()
    return (means + one.trace() + two.trace() - 2 * shared).item()


DCGAN = Task(
    name="DCGAN",
    claim="images",
    data="scikit-learn's digits, 1257 images to train on and 540 held out",
    metric="Frechet distance",
    higher=False,
    steps=800,
    start=_Training,
)
