"""Residual networks, a U-Net, and DCGAN's generator and discriminator."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


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
        return F.cross_entropy(self.head(self.stages(self.stem(images)).mean((2, 3))), targets)


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
    """DCGAN's generator (Radford et al., 2016): (B, noise, 1, 1) -> images (B, channels, S, S) from
    -1 to 1; S is `first`, doubled `levels` times: 64 in the original.
    """

    def __init__(
        self, *, noise: int = 100, width: int = 64, levels: int = 4, channels: int = 3,
        first: int = 4,
    ) -> None:  # fmt: skip
        super().__init__()
        layers: list[nn.Module] = []
        widths = [noise, *(width * 2**level for level in reversed(range(levels)))]
        for place, (into, out) in enumerate(itertools.pairwise(widths)):
            kernel, stride, padding = (4, 2, 1) if place else (first, 1, 0)
            conv = nn.ConvTranspose2d(into, out, kernel, stride, padding, bias=False)
            layers += [conv, nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
        last = nn.ConvTranspose2d(width, channels, 4, 2, 1, bias=False)
        self.layers = nn.Sequential(*layers, last)

    def forward(self, noise: Tensor) -> Tensor:
        result: Tensor = self.layers(noise).tanh()
        return result


class Discriminator(nn.Module):
    """DCGAN's discriminator: (B, channels, S, S) images -> (B,), before the sigmoid; S as above."""

    def __init__(
        self, *, width: int = 64, levels: int = 4, channels: int = 3, last: int = 4
    ) -> None:
        super().__init__()
        stem = nn.Conv2d(channels, width, 4, 2, 1, bias=False)
        layers: list[nn.Module] = [stem, nn.LeakyReLU(0.2)]
        widths = [width * 2**level for level in range(levels)]
        for into, out in itertools.pairwise(widths):
            conv = nn.Conv2d(into, out, 4, 2, 1, bias=False)
            layers += [conv, nn.BatchNorm2d(out), nn.LeakyReLU(0.2, inplace=True)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, last, 1, 0, bias=False))

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.layers(images).flatten()
        return result


def drawn_as_dcgan(model: Model) -> Model:
    """The same model, its weights drawn with DCGAN's deviation of 0.02."""
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(layer.weight, 0.0, 0.02)
        elif isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.weight, 1.0, 0.02)
    return model


# -- odd -------------------------------------------------------------------------------------------
# Networks whose sizes are no multiples of 8, as the originals' are.


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
