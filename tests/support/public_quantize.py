"""An autoencoder with a vector quantizer, in the manner of vector-quantize-pytorch."""

import torch
import torch.nn.functional as F
from public_loops import optimizer, usual
from torch import Tensor, nn

CODES, WIDTH = 16, 16


def distances(x: Tensor, y: Tensor) -> Tensor:
    """[heads, n, d], [heads, m, d] -> [heads, n, m]."""
    x2, y2 = (x**2).sum(-1), (y**2).sum(-1)
    xy = torch.einsum("bid,bjd->bij", x, y) * -2
    return (x2[:, :, None] + y2[:, None, :] + xy).clamp(min=1e-8).sqrt()


def averaged_in(old: Tensor, new: Tensor, decay: float) -> None:
    if old.grad is not None:
        new.add_(old.grad)
        old.grad = None
    old.data.lerp_(new.to(old), 1.0 - decay)


def means_of(samples: Tensor, count: int, rounds: int = 3) -> tuple[Tensor, Tensor]:
    """k-means of [heads, n, d], from evenly spaced samples: the means and their sizes."""
    means = samples[:, :: samples.shape[1] // count][:, :count]
    for _ in range(rounds):
        buckets = torch.argmax(-distances(samples, means), dim=-1)
        bins = torch.zeros(len(samples), count, dtype=torch.long, device=samples.device)
        bins.scatter_add_(-1, buckets, torch.ones_like(buckets))
        none = bins == 0
        found = buckets.new_zeros(*means.shape, dtype=samples.dtype)
        found.scatter_add_(1, buckets[..., None].expand_as(samples), samples)
        found = found / bins.masked_fill(none, 1)[..., None]
        means = torch.where(none[..., None], means, found)
    return means, bins


class Codebook(nn.Module):
    """Learns by moving averages, from the means of the first batch on."""

    def __init__(self, decay: float = 0.8, eps: float = 1e-5) -> None:
        super().__init__()
        self.decay, self.eps = decay, eps
        self.register_buffer("initted", torch.tensor(False))
        self.register_buffer("cluster_size", torch.ones(1, CODES))
        self.register_buffer("embed_avg", torch.zeros(1, CODES, WIDTH))
        self.register_buffer("embed", torch.zeros(1, CODES, WIDTH))

    def init_embed_(self, data: Tensor) -> None:
        if self.initted:
            return
        embed, sizes = means_of(data, CODES)
        self.embed_avg.data.copy_(embed * sizes[..., None])
        self.cluster_size.data.copy_(sizes)
        self.update_ema()
        self.initted.data.copy_(torch.tensor(True))

    def update_ema(self) -> None:
        total = self.cluster_size.sum(dim=-1, keepdim=True)
        smooth = (self.cluster_size + self.eps) / (total + CODES * self.eps) * total
        self.embed.data.copy_(self.embed_avg / smooth[..., None])

    @torch.autocast("cpu", enabled=False)
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.float()[None]
        flat = x.reshape(1, -1, WIDTH)
        self.init_embed_(flat)
        embed = self.embed.detach().to(x.dtype)
        found = (-distances(flat, embed)).argmax(dim=-1)
        one_hot = F.one_hot(found, CODES).type(x.dtype)
        shape = (*x.shape[:-1], CODES)
        quantized = torch.einsum("hbnc,hcd->hbnd", one_hot.view(shape), embed)
        if self.training:
            averaged_in(self.cluster_size, one_hot.sum(dim=1), self.decay)
            sums = torch.einsum("hnd,hnc->hcd", flat, one_hot).contiguous()
            averaged_in(self.embed_avg, sums, self.decay)
            self.update_ema()
        return quantized[0], found.view(shape[1:-1])


class VectorQuantize(nn.Module):
    """Returns what is nearest to each column of a map, its number, and the commitment loss."""

    def __init__(self) -> None:
        super().__init__()
        self._codebook = Codebook()
        self.register_buffer("zero", torch.tensor(0.0), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, _, height, width = x.shape
        x = x.flatten(2).transpose(1, 2)
        quantized, found = self._codebook(x)
        quantized = quantized.type(x.dtype)
        loss = torch.tensor(0.0, device=x.device, requires_grad=self.training)
        if self.training:
            committed = quantized.detach()
            quantized = x + (quantized - x).detach()
            loss = loss + F.mse_loss(committed, x)
        quantized = quantized.transpose(1, 2).unflatten(2, (height, width))
        return quantized, found.unflatten(1, (height, width)), loss


class Autoencoder(nn.Module):
    """A chain of layers, one of which returns more than its result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Conv2d(1, 8, kernel_size=3, stride=1, padding=1),
                nn.MaxPool2d(kernel_size=2, stride=2),
                nn.GELU(),
                nn.Conv2d(8, WIDTH, kernel_size=3, stride=1, padding=1),
                nn.MaxPool2d(kernel_size=2, stride=2),
                VectorQuantize(),
                nn.Upsample(scale_factor=2, mode="nearest"),
                nn.Conv2d(WIDTH, 8, kernel_size=3, stride=1, padding=1),
                nn.GELU(),
                nn.Upsample(scale_factor=2, mode="nearest"),
                nn.Conv2d(8, 1, kernel_size=3, stride=1, padding=1),
            ]
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        more: tuple[Tensor, ...] = ()
        for layer in self.layers:
            if isinstance(layer, VectorQuantize):
                x, *rest = layer(x)
                more = tuple(rest)
            else:
                x = layer(x)
        found, loss = more
        return x, found, loss


def autoencoder() -> list[nn.Module]:
    return [Autoencoder()]


def batch() -> tuple[Tensor, ...]:
    """Stripes of a few widths."""
    width = torch.randint(1, 5, (8, 1, 1, 1))
    return (torch.sin(torch.arange(12.0) / width).expand(8, 1, 12, 12).contiguous(),)


adamw = optimizer(torch.optim.AdamW, 3e-3)


@usual
def step(model: nn.Module, x: Tensor) -> Tensor:
    out, _, commitment = model(x)
    out = out.clamp(-1.0, 1.0)
    return (out - x).abs().mean() + 10 * commitment
