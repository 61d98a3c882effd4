"""Classification: a residual network and an Inception network on scikit-learn's digits.

* "Deep Residual Learning for Image Recognition" (He et al., 2015), in its form for CIFAR: three
  stages of basic blocks, a stride of 2 between stages.
* "Batch Normalization" (Ioffe and Szegedy, 2015) and "Rethinking the Inception Architecture"
  (Szegedy et al., 2015): modules of four branches (1x1; 1x1 and 3x3; 1x1 and two 3x3; pooling and
  1x1) with batch norm after every convolution.

Images are shifted by up to a pixel for each batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.digits import digits
from benchmarks.harness.ways import Trainer
from benchmarks.papers.task import Metrics, OneModel, Task, one_cycle

BATCH = 64
STEPS = 300
PEAK = 0.1
"""Of the learning rate."""


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Convolution and batch norm."""
    padding = kernel // 2
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, by a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, 3, stride)
        self.second = _convolution(outputs, outputs, 3)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.second(F.relu(self.first(x)))
        return F.relu(inner + self.shortcut(x))


class _Layers(nn.Sequential):
    """One after the other."""

    def forward(self, x: Tensor) -> Tensor:
        # Of its own: `nn.Module.compile` leaves a frame of nn.Sequential's to eager (torch 2.13).
        return super().forward(x)


class _ResNet(_Layers):
    """Images (B, 1, 8, 8) -> logits (B, 10)."""

    def __init__(self) -> None:
        super().__init__(
            _convolution(1, 16, 3), nn.ReLU(),
            _Block(16, 16, 1), _Block(16, 32, 2), _Block(32, 64, 2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip


class _Inception(nn.Module):
    """Four branches side by side, `widths` channels each."""

    def __init__(self, inputs: int, widths: tuple[int, int, int, int]) -> None:
        super().__init__()
        one, three, double, pooled = widths
        self.one = nn.Sequential(_convolution(inputs, one, 1), nn.ReLU())
        self.three = nn.Sequential(
            _convolution(inputs, three // 2, 1), nn.ReLU(),
            _convolution(three // 2, three, 3), nn.ReLU(),
        )  # fmt: skip
        self.twice = nn.Sequential(
            _convolution(inputs, double // 2, 1), nn.ReLU(),
            _convolution(double // 2, double, 3), nn.ReLU(),
            _convolution(double, double, 3), nn.ReLU(),
        )  # fmt: skip
        self.pooled = nn.Sequential(
            nn.AvgPool2d(3, stride=1, padding=1), _convolution(inputs, pooled, 1), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.twice(x), self.pooled(x)], dim=1)


class _GoogLeNet(_Layers):
    """Images (B, 1, 8, 8) -> logits (B, 10)."""

    def __init__(self) -> None:
        super().__init__(
            _convolution(1, 16, 3), nn.ReLU(),
            _Inception(16, (8, 16, 16, 8)),
            nn.MaxPool2d(3, stride=2, padding=1),
            _Inception(48, (16, 24, 24, 16)),
            nn.MaxPool2d(3, stride=2, padding=1),
            _Inception(80, (24, 32, 32, 16)),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(104, 10),
        )  # fmt: skip


Split = tuple[Tensor, Tensor]


@functools.cache
def _images(device: torch.device) -> tuple[Split, Split]:
    """(N, 1, 8, 8), mean 0 and deviation 1 in the training part; labels (N,)."""
    (train_x, train_y), (test_x, test_y) = digits(device)
    mean, deviation = train_x.mean(), train_x.std()
    train, test = ((x.reshape(-1, 1, 8, 8) - mean) / deviation for x in (train_x, test_x))
    return (train, train_y), (test, test_y)


class _Training(OneModel):
    def __init__(self, net: Callable[[], nn.Module], trainer: Trainer, seed: int) -> None:
        sgd = functools.partial(torch.optim.SGD, lr=PEAK, momentum=0.9, weight_decay=5e-4)
        super().__init__(trainer, seed, net(), sgd, schedule=one_cycle(PEAK, STEPS))

    def _draw(self, seed: int) -> Iterator[Split]:
        images, labels = _images(self._device)[0]
        generator = torch.Generator().manual_seed(seed)
        while True:
            for chosen in torch.randperm(len(labels), generator=generator).split(BATCH)[:-1]:
                top, left = torch.randint(3, (2,), generator=generator).tolist()
                # The darkest value is the background.
                framed = F.pad(images[chosen], (1, 1, 1, 1), value=images.min().item())
                yield framed[:, :, top : top + 8, left : left + 8].contiguous(), labels[chosen]

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self._net(images), labels)

    @torch.no_grad()
    def judge(self) -> Metrics:
        images, labels = _images(self._device)[1]
        self._net.eval()
        logits = self._net.forward(images)
        self._net.train()
        return {
            "held-out loss": F.cross_entropy(logits, labels).item(),
            "accuracy, %": 100 * (logits.argmax(1) == labels).double().mean().item(),
        }


def _task(name: str, net: Callable[[], nn.Module]) -> Task:
    return Task(
        name=name,
        claim="classification",
        data="scikit-learn's digits, 1257 images to train on and 540 held out",
        metric="accuracy, %",
        higher=True,
        steps=STEPS,
        start=functools.partial(_Training, net),
        grains={"accuracy, %": 100 / 540},
    )


RESNET = _task("ResNet", _ResNet)
INCEPTION = _task("Inception", _GoogLeNet)
