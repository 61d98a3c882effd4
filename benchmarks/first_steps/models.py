"""Models and losses that only this benchmark trains. B examples each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "VAE",
    "Autoencoder",
    "Speech",
    "Towers",
    "ctc_loss",
    "denoiser",
    "gan_models",
    "tanh_net",
    "vae_loss",
]


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


def gan_models() -> tuple[nn.Module, nn.Module]:
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
