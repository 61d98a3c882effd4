"""The networks that the benchmarks train, from plain torch.nn: all but DCGAN's return their loss.

Sizes and layer order are the originals'. A model is called with an input and its targets, both of
which `Sample` makes. Shapes below: B examples, T tokens, D width, C channels.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "GPT2",
    "MLP",
    "Attention",
    "BERTEncoder",
    "Detector",
    "Discriminator",
    "Generator",
    "Recommender",
    "ResNet",
    "Sample",
    "Tagger",
    "UNet",
    "ViT",
    "resnet18",
    "resnet50",
]


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a model is called with.

    Attributes:
        shape: of the input.
        targets: of the targets.
        classes: targets are 0 .. classes - 1.
        vocab: the input is numbers 0 .. vocab - 1; 0: it is FP32, normally distributed.
    """

    shape: tuple[int, ...]
    targets: tuple[int, ...]
    classes: int
    vocab: int = 0

    def empty(self, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Input and targets whose values do not matter, and whose memory is never touched."""
        kind = torch.int64 if self.vocab else dtype
        x = torch.empty(self.shape, device=device, dtype=kind)
        return [x, torch.empty(self.targets, device=device, dtype=torch.int64)]

    def draw(self, device: torch.device) -> list[Tensor]:
        """Input and targets at random, from torch's current seed."""
        x = torch.randint(self.vocab, self.shape) if self.vocab else torch.randn(self.shape)
        return [x.to(device), torch.randint(self.classes, self.targets).to(device)]


# -- transformers ---------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention, (B, T, D) -> (B, T, D); queries, keys and values from one product."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        dropped = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=self.causal)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return result


class _Layer(nn.Module):
    """One transformer layer, (B, T, D) -> (B, T, D); dropout on both branches.

    Args:
        before: norms stand before the branches (GPT-2, ViT), else after the sums (BERT).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        before: bool,
        causal: bool = False,
        tanh: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.before = before
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attention = Attention(width, heads, causal=causal, dropout=attention_dropout)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.up = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU(approximate="tanh" if tanh else "none")
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def _feed_forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(self.down(self.gelu(self.up(x))))
        return result

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x + self.dropout(self.attention(self.norm1(x)))
            return x + self._feed_forward(self.norm2(x))
        x = self.norm1(x + self.dropout(self.attention(x)))
        result: Tensor = self.norm2(x + self._feed_forward(x))
        return result


class GPT2(nn.Module):
    """GPT-2 (Radford et al., 2019), 124M by default; tied head, mean cross-entropy (B, T)."""

    def __init__(
        self,
        *,
        vocab: int = 50257,
        context: int = 1024,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            _Layer(width, heads, before=True, causal=True, tanh=True, dropout=dropout,
                   attention_dropout=attention_dropout)
            for _ in range(layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        steps = torch.arange(idx.shape[1], device=idx.device)
        x = self.dropout(self.tokens(idx) + self.positions(steps))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class BERTEncoder(nn.Module):
    """BERT's embeddings and layers (Devlin et al., 2019), large by default.

    A tag for every token stands in for the two heads of pre-training.
    """

    def __init__(
        self,
        *,
        vocab: int = 30522,
        context: int = 512,
        width: int = 1024,
        layers: int = 24,
        heads: int = 16,
        tags: int = 2,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            _Layer(width, heads, before=False, dropout=dropout, eps=1e-12,
                   attention_dropout=attention_dropout)
            for _ in range(layers)
        )  # fmt: skip
        self.head = nn.Linear(width, tags)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        steps = torch.arange(idx.shape[1], device=idx.device)
        segments = self.segments(torch.zeros_like(idx))
        x = self.dropout(self.norm(self.tokens(idx) + self.positions(steps) + segments))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class ViT(nn.Module):
    """Vision transformer (Dosovitskiy et al., 2021), B/16 by default: (B, 3, H, W) images."""

    def __init__(
        self,
        *,
        size: int = 224,
        patch: int = 16,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
        self.layers = nn.ModuleList(
            _Layer(width, heads, before=True, eps=1e-6) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), targets)


# -- convolutional networks -----------------------------------------------------------------------


def _conv_norm(into: int, out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(into, out, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out))


class _Residual(nn.Module):
    """ReLU(branch + shortcut), the shortcut projected where shapes differ."""

    def __init__(self, branch: nn.Module, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.branch = branch
        same = into == out and stride == 1
        self.shortcut = nn.Identity() if same else _conv_norm(into, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


def _basic(into: int, width: int, stride: int) -> tuple[nn.Module, int]:
    branch = nn.Sequential(
        _conv_norm(into, width, 3, stride), nn.ReLU(inplace=True), _conv_norm(width, width, 3)
    )
    return _Residual(branch, into, width, stride), width


def _bottleneck(into: int, width: int, stride: int) -> tuple[nn.Module, int]:
    branch = nn.Sequential(
        _conv_norm(into, width, 1), nn.ReLU(inplace=True),
        _conv_norm(width, width, 3, stride), nn.ReLU(inplace=True),
        _conv_norm(width, 4 * width, 1),
    )  # fmt: skip
    return _Residual(branch, into, 4 * width, stride), 4 * width


class ResNet(nn.Module):
    """Residual network (He et al., 2016; stride in the 3x3 convolution): (B, 3, H, W) images."""

    def __init__(
        self,
        block: Callable[[int, int, int], tuple[nn.Module, int]],
        depths: tuple[int, ...],
        *,
        width: int = 64,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        stem = _conv_norm(3, width, 7, 2)
        self.stem = nn.Sequential(stem, nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        stages, channels = [], width
        for level, depth in enumerate(depths):
            for place in range(depth):
                stride = 2 if level and not place else 1
                module, channels = block(channels, width * 2**level, stride)
                stages.append(module)
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.stages(self.stem(images)).mean((2, 3))
        return F.cross_entropy(self.head(x), targets)


def resnet18(*, width: int = 64, depth: int = 2) -> ResNet:
    """The original has `depth` two: blocks in each of four stages."""
    return ResNet(_basic, (depth,) * 4, width=width)


def resnet50(*, width: int = 64) -> ResNet:
    return ResNet(_bottleneck, (3, 4, 6, 3), width=width)


class UNet(nn.Module):
    """U-Net with padded convolutions and batch norm (Ronneberger et al., 2015), on (B, 3, H, W).

    Each level halves the image and doubles the channels; the loss is over every pixel.
    """

    def __init__(self, *, width: int = 32, levels: int = 4, classes: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(
            self._double(i, o) for i, o in zip([3, *widths], widths, strict=False)
        )
        steps = list(zip(widths[1:], widths[:-1], strict=True))[::-1]
        self.widen = nn.ModuleList(nn.ConvTranspose2d(i, o, 2, 2) for i, o in steps)
        self.up = nn.ModuleList(self._double(2 * o, o) for _, o in steps)
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _double(into: int, out: int) -> nn.Sequential:
        return nn.Sequential(
            _conv_norm(into, out, 3), nn.ReLU(inplace=True),
            _conv_norm(out, out, 3), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        kept, x = [], images
        for level, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for widen, up, skipped in zip(self.widen, self.up, kept[-2::-1], strict=True):
            x = up(torch.cat([skipped, widen(x)], dim=1))
        return F.cross_entropy(self.head(x), targets)


class Generator(nn.Module):
    """DCGAN's generator (Radford et al., 2016): (B, noise, 1, 1) -> (B, 3, 64, 64) images."""

    def __init__(self, *, noise: int = 100, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        widths = [noise, *(width * 2**level for level in (3, 2, 1, 0))]
        for place, (into, out) in enumerate(itertools.pairwise(widths)):
            stride, padding = (2, 1) if place else (1, 0)
            conv = nn.ConvTranspose2d(into, out, 4, stride, padding, bias=False)
            layers += [conv, nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False))

    def forward(self, noise: Tensor) -> Tensor:
        result: Tensor = self.layers(noise).tanh()
        return result


class Discriminator(nn.Module):
    """DCGAN's discriminator: (B, 3, 64, 64) images -> (B,), before the sigmoid."""

    def __init__(self, *, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
        for level in range(3):
            into, out = width * 2**level, width * 2 ** (level + 1)
            conv = nn.Conv2d(into, out, 4, 2, 1, bias=False)
            layers += [conv, nn.BatchNorm2d(out), nn.LeakyReLU(0.2, inplace=True)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False))

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.layers(images).flatten()
        return result


# -- small networks -------------------------------------------------------------------------------


class MLP(nn.Module):
    """Linear layers and ReLU on (B, D) rows."""

    def __init__(self, *, inputs: int = 64, width: int = 64, layers: int = 4, classes: int = 10):
        super().__init__()
        sizes = [inputs, *[width] * layers]
        hidden = [
            module for i, o in itertools.pairwise(sizes) for module in (nn.Linear(i, o), nn.ReLU())
        ]
        self.hidden = nn.Sequential(*hidden)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(x)), targets)


class Tagger(nn.Module):
    """An LSTM over (B, T) tokens, then a linear layer that tags each of them."""

    def __init__(self, *, vocab: int = 256, width: int = 64, tags: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, tags)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x, _ = self.lstm(self.tokens(idx))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


# -- odd sizes ------------------------------------------------------------------------------------


class Recommender(nn.Module):
    """DLRM (Naumov et al., 2019) on (B, 13) numbers: two towers, and products of 27 features.

    The sparse features, of which a click log has 26, are hashes of the numbers.
    """

    def __init__(self, *, rows: int = 50, width: int = 64) -> None:
        super().__init__()
        self.rows = rows
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, width)
        )
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(26))
        self.top = nn.Sequential(
            nn.Linear(width + 27 * 13, 479), nn.ReLU(), nn.Linear(479, 367), nn.ReLU(),
            nn.Linear(367, 1),
        )  # fmt: skip

    def forward(self, numbers: Tensor, targets: Tensor) -> Tensor:
        x = self.bottom(numbers)
        hashes = (numbers.repeat(1, 2) * 1e3).long() % self.rows
        tables = zip(self.tables, hashes.unbind(1), strict=True)
        features = torch.stack([x, *(table(index) for table, index in tables)], 1)
        pairs = torch.bmm(features, features.transpose(1, 2))
        first, second = torch.tril_indices(27, 27, -1, device=x.device).unbind(0)
        out = self.top(torch.cat([x, pairs[:, first, second]], 1))
        return F.binary_cross_entropy_with_logits(out.squeeze(1), targets.float())


class Detector(nn.Module):
    """SSD's heads (Liu et al., 2016) on (B, 3, S, S) images: three maps, 4 or 6 anchors at each
    place, for each of them 81 classes and a box. Targets are classes, (B, `places(S)`).
    """

    ANCHORS = (4, 6, 4)

    def __init__(self, *, width: int = 64, classes: int = 81) -> None:
        super().__init__()
        self.sizes = classes, 4
        widths = (width, 2 * width, width)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Conv2d(i, o, 3, stride=2, padding=1) for i, o in itertools.pairwise(widths)
        )
        self.classes, self.boxes = (
            nn.ModuleList(
                nn.Conv2d(c, a * size, 3, padding=1)
                for c, a in zip(widths, self.ANCHORS, strict=True)
            )
            for size in self.sizes
        )

    @classmethod
    def places(cls, size: int) -> int:
        """How many anchors an image of this size has."""
        sides = (size, -(-size // 2), -(-size // 4))
        return sum(a * side**2 for a, side in zip(cls.ANCHORS, sides, strict=True))

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        maps = [F.relu(self.stem(images))]
        for layer in self.down:
            maps.append(F.relu(layer(maps[-1])))
        classes, boxes = (
            torch.cat(
                [
                    head(x).permute(0, 2, 3, 1).reshape(len(x), -1, size)
                    for head, x in zip(heads, maps, strict=True)
                ],
                dim=1,
            )
            for heads, size in zip((self.classes, self.boxes), self.sizes, strict=True)
        )
        return F.cross_entropy(classes.flatten(0, 1), targets.flatten()) + boxes.abs().mean()
