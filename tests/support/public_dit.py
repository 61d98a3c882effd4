"""A diffusion Transformer in the manner of DiT, with its averaged weights and learned variances."""

import copy
import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from public_loops import Clip, Models, Optimizers, Step, optimizer
from torch import Tensor, nn

SIZE, PATCH, CHANNELS, WIDTH, HEADS, CLASSES, TIMES = 8, 2, 4, 32, 2, 10, 100

BETAS = torch.linspace(1e-3, 0.2, TIMES, dtype=torch.float64)
LEFT = torch.cumprod(1 - BETAS, 0)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimestepEmbedder(nn.Module):
    def __init__(self, frequencies: int = 16) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(frequencies, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.frequencies = frequencies

    @staticmethod
    def timestep_embedding(t: Tensor, dim: int, longest: int = 10000) -> Tensor:
        half = dim // 2
        steps = torch.arange(start=0, end=half, dtype=torch.float32)
        rates = torch.exp(-math.log(longest) * steps / half).to(device=t.device)
        angles = t[:, None].float() * rates[None]
        return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)

    def forward(self, t: Tensor) -> Tensor:
        return self.mlp(self.timestep_embedding(t, self.frequencies))


class LabelEmbedder(nn.Module):
    """Forgets some of the labels in training."""

    def __init__(self, forgotten: float = 0.1) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(CLASSES + 1, WIDTH)
        self.forgotten = forgotten

    def forward(self, labels: Tensor, train: bool) -> Tensor:
        if train and self.forgotten > 0:
            drop = torch.rand(labels.shape[0], device=labels.device) < self.forgotten
            labels = torch.where(drop, CLASSES, labels)
        return self.embedding_table(labels)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.attn = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        found = self.adaLN_modulation(c).chunk(6, dim=1)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = found
        attended = self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        x = x + gate_msa.unsqueeze(1) * attended
        return x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


class FinalLayer(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(WIDTH, PATCH * PATCH * channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class DiT(nn.Module):
    """Its positions are a parameter that needs no gradient.

    What DiT starts with zeros, and so without a gradient after it, is small here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder = nn.Conv2d(CHANNELS, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.t_embedder, self.y_embedder = TimestepEmbedder(), LabelEmbedder()
        patches = (SIZE // PATCH) ** 2
        self.pos_embed = nn.Parameter(torch.zeros(1, patches, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList([Block() for _ in range(1)])
        self.final_layer = FinalLayer(2 * CHANNELS)
        self.apply(self._start)
        table = TimestepEmbedder.timestep_embedding(torch.arange(patches), WIDTH)
        self.pos_embed.data.copy_(table.unsqueeze(0))

    def _start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.constant_(module.bias, 0)

    def unpatchify(self, x: Tensor) -> Tensor:
        c, side = 2 * CHANNELS, int(x.shape[1] ** 0.5)
        assert side * side == x.shape[1]
        x = x.reshape(shape=(x.shape[0], side, side, PATCH, PATCH, c))
        x = torch.einsum("nhwpqc->nchpwq", x)
        return x.reshape(shape=(x.shape[0], c, side * PATCH, side * PATCH))

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_embedder(t) + self.y_embedder(y, self.training)
        for block in self.blocks:
            x = block(x, c)
        return self.unpatchify(self.final_layer(x, c))


def at(table: Tensor, t: Tensor, x: Tensor) -> Tensor:
    """The entries of an FP64 table for each row of `x`, shaped so that they multiply it."""
    found = table.to(device=t.device)[t].float()
    while found.dim() < x.dim():
        found = found[..., None]
    return found + torch.zeros(x.shape, device=t.device)


def training_losses(model: nn.Module, start: Tensor, t: Tensor, y: Tensor, noise: Tensor) -> Tensor:
    """The squared error of the noise, and a bound on the variances from which no gradient reaches
    the means; for each row.
    """
    x = at(LEFT.sqrt(), t, start) * start + at((1 - LEFT).sqrt(), t, start) * noise
    out, spread = torch.split(model(x, t, y), CHANNELS, dim=1)
    least, most = at(BETAS.log() - 1, t, x), at(BETAS.log(), t, x)
    share = (spread + 1) / 2
    log_variance = share * most + (1 - share) * least
    difference = at(BETAS / (1 - LEFT).sqrt(), t, x) * (noise - out.detach())
    bound = 0.5 * (
        -1.0 + log_variance - least + torch.exp(least - log_variance)
        + difference**2 * torch.exp(-log_variance)
    )  # fmt: skip
    dims = list(range(1, x.dim()))
    return ((noise - out) ** 2).mean(dim=dims) + bound.mean(dim=dims) / math.log(2.0)


def dit() -> list[nn.Module]:
    return [DiT()]


def batch() -> tuple[Tensor, ...]:
    y = torch.randint(CLASSES, (8,))
    x = torch.sin(y[:, None, None, None] + torch.arange(SIZE)) + 0.1 * torch.randn(
        8, CHANNELS, SIZE, SIZE
    )
    return x, torch.randint(TIMES, (8,)), y, torch.randn_like(x)


adamw = optimizer(torch.optim.AdamW, 1e-3, weight_decay=0)


@torch.no_grad()
def update_ema(ema: nn.Module, model: nn.Module, decay: float = 0.99) -> None:
    averaged = OrderedDict(ema.named_parameters())
    for name, param in OrderedDict(model.named_parameters()).items():
        averaged[name].mul_(decay).add_(param.data, alpha=1 - decay)


def step(models: Models, optimizers: Optimizers, clip: Clip) -> Step:
    (model,), (optimizer,) = models, optimizers
    ema = copy.deepcopy(model)
    for p in ema.parameters():
        p.requires_grad = False

    def step(x: Tensor, t: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        loss = training_losses(model, x, t, y, noise).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_ema(ema, model)
        return (loss.detach(),)

    return step
