"""MNIST, DCGAN and VAE in the manner of pytorch/examples, and what one step of theirs does."""

import torch
import torch.nn.functional as F
from public_loops import Clip, Models, Optimizers, Step, optimizer, usual
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.models.images import Discriminator, Generator, drawn_as_dcgan

NOISE, FILTERS, PIXELS, LATENT = 16, 8, 144, 8

# -- MNIST -----------------------------------------------------------------------------------------


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 16, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(256, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        x = self.fc2(self.dropout2(x))
        return F.log_softmax(x, dim=1)


def mnist() -> list[nn.Module]:
    return [Classifier()]


def mnist_batch() -> tuple[Tensor, ...]:
    """A bright row or column, whose number is the class."""
    y = torch.randint(10, (16,))
    x = 0.1 * torch.randn(16, 1, 12, 12)
    x[torch.arange(16), 0, y + 1] += 1.5
    return x, y


adadelta = optimizer(torch.optim.Adadelta, 1.0)


@usual
def mnist_step(model: nn.Module, data: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(model(data), target)


# -- DCGAN -----------------------------------------------------------------------------------------


def dcgan() -> list[nn.Module]:
    """The generator and the discriminator."""
    judge = nn.Sequential(Discriminator(width=FILTERS, levels=2), nn.Sigmoid())
    return [drawn_as_dcgan(m) for m in (Generator(noise=NOISE, width=FILTERS, levels=2), judge)]


def dcgan_batch() -> tuple[Tensor, ...]:
    """Stripes, and noise for as many images."""
    phase = torch.rand(16, 1, 1, 1) * 6
    stripes = torch.sin(torch.arange(16.0) + phase).expand(16, 3, 16, 16)
    return stripes + 0.05 * torch.randn(16, 3, 16, 16), torch.randn(16, NOISE, 1, 1)


def adams(models: Models, rate: float) -> list[Optimizer]:
    return [
        torch.optim.Adam(model.parameters(), lr=2e-4 * rate, betas=(0.5, 0.999)) for model in models
    ]


def dcgan_step(models: Models, optimizers: Optimizers, clip: Clip) -> Step:
    (net_g, net_d), (optimizer_g, optimizer_d) = models, optimizers
    criterion = nn.BCELoss()

    def step(real: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        net_d.zero_grad()
        label = torch.full((real.size(0),), 1, dtype=real.dtype, device=real.device)
        err_real = criterion(net_d(real), label)
        err_real.backward()
        fake = net_g(noise)
        label.fill_(0)
        err_fake = criterion(net_d(fake.detach()), label)
        err_fake.backward()
        err_d = err_real + err_fake
        optimizer_d.step()
        net_g.zero_grad()
        label.fill_(1)
        err_g = criterion(net_d(fake), label)
        err_g.backward()
        optimizer_g.step()
        return (err_d.detach() + err_g.detach(),)

    return step


# -- VAE -------------------------------------------------------------------------------------------


class VAE(nn.Module):
    """`noise` stands in for what `reparameterize` draws, whose values depend on its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(PIXELS, 64)
        self.fc21, self.fc22 = nn.Linear(64, LATENT), nn.Linear(64, LATENT)
        self.fc3, self.fc4 = nn.Linear(LATENT, 64), nn.Linear(64, PIXELS)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(self.fc1(x))
        return self.fc21(hidden), self.fc22(hidden)

    def reparameterize(self, mu: Tensor, logvar: Tensor, noise: Tensor | None) -> Tensor:
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std) if noise is None else noise
        return mu + eps * std

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x.view(-1, PIXELS))
        return self.decode(self.reparameterize(mu, logvar, noise)), mu, logvar


def vae() -> list[nn.Module]:
    return [VAE()]


def vae_batch() -> tuple[Tensor, ...]:
    x, _ = mnist_batch()
    return x.clamp(0, 1), torch.randn(16, LATENT)


adam = optimizer(torch.optim.Adam, 1e-3)


def vae_loss(made: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
    bce = F.binary_cross_entropy(made, x.view(-1, PIXELS), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


@usual
def vae_step(model: nn.Module, data: Tensor, noise: Tensor) -> Tensor:
    made, mu, logvar = model(data, noise)
    return vae_loss(made, data, mu, logvar)
