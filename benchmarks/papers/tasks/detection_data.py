"""Generated scenes: one to four shapes on a shaded, noisy ground with clutter."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from benchmarks.papers import boxes
from benchmarks.papers.boxes import corners, iou

SIDE = 64
SHAPES = ("ellipse", "rectangle", "triangle", "cross")
OBJECTS = 4
"""At most, in one scene."""
SIZES = (14.0, 40.0)
"""Pixels: the root of a bounding box's area."""
_DRAWS = 10
"""Places that are tried for an object; it is left out if each overlaps another one too much."""


@dataclasses.dataclass(frozen=True)
class Scenes:
    """N scenes.

    Attributes:
        images: (N, 3, 64, 64), FP32, about -1 to 1.
        boxes: (N, 4, 4), corners, in shares of the image's side.
        labels: (N, 4), int64: an index into SHAPES; -1: no object.
    """

    images: Tensor
    boxes: Tensor
    labels: Tensor

    def __getitem__(self, chosen: Tensor | slice) -> Scenes:
        return Scenes(self.images[chosen], self.boxes[chosen], self.labels[chosen])

    def to(self, device: torch.device) -> Scenes:
        return Scenes(self.images.to(device), self.boxes.to(device), self.labels.to(device))


@functools.cache
def scenes(count: int, seed: int) -> Scenes:
    """The same ones for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    boxes, labels = _placed(count, generator)
    layers, colours = _clutter(count, generator)
    ground = 0.2 + 0.6 * _uniform(generator, count, 3)
    for k in range(OBJECTS):
        layers[_inside(boxes[:, k], labels[:, k])] = len(colours)
        off = 0.25 + 0.35 * _uniform(generator, count, 3)  # from the ground, in every channel
        colours.append(torch.where(ground < 0.5, ground + off, ground - off))
    palette = torch.stack([ground, *colours[1:]], dim=2)  # (N, 3, layers)
    index = layers.view(count, 1, -1).expand(-1, 3, -1).long()
    images = palette.gather(2, index).view(count, 3, SIDE, SIDE)
    images += _shade(count, generator)
    images += 0.06 * torch.randn(images.shape, generator=generator)
    return Scenes(images * 2 - 1, boxes / SIDE, labels)


def _uniform(generator: Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=generator)


def _placed(count: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Boxes (N, 4, 4), corners in pixels; labels (N, 4). None overlaps by more than an IoU of 0.15.

    Later ones are drawn over earlier ones.
    """
    wanted = torch.randint(1, OBJECTS + 1, (count, 1), generator=generator)
    labels = torch.randint(len(SHAPES), (count, OBJECTS), generator=generator)
    low, high = map(math.log, SIZES)
    boxes = torch.zeros(count, OBJECTS, 4)
    rows = torch.arange(count)
    for k in range(OBJECTS):
        size = torch.exp(low + (high - low) * _uniform(generator, count, _DRAWS, 1))
        stretch = torch.exp(0.3 * (2 * _uniform(generator, count, _DRAWS, 1) - 1))
        extent = torch.cat([size * stretch, size / stretch], dim=-1)
        middle = extent / 2 + (SIDE - extent) * _uniform(generator, count, _DRAWS, 2)
        drawn = corners(torch.cat([middle, extent], dim=-1))
        free = iou(drawn, boxes).amax(2) <= 0.15
        boxes[:, k] = drawn[rows, free.int().argmax(1)]
        placed = free.any(1) & (k < wanted.squeeze(1))
        boxes[~placed, k] = 0
        labels[~placed, k] = -1
    return boxes, labels


def _grid() -> tuple[Tensor, Tensor]:
    """Of the pixels' centres: x (1, 1, 64) and y (1, 64, 1)."""
    line = torch.arange(SIDE) + 0.5
    return line.view(1, 1, -1), line.view(1, -1, 1)


def _shade(count: int, generator: Generator) -> Tensor:
    """What a slanting light adds: (N, 3, 64, 64)."""
    x, y = _grid()
    slope = 0.4 * (_uniform(generator, 2, count, 3, 1, 1) - 0.5)
    return slope[0] * (x / SIDE - 0.5) + slope[1] * (y / SIDE - 0.5)


def _clutter(count: int, generator: Generator, pieces: int = 6) -> tuple[Tensor, list[Tensor]]:
    """Dots and strokes of 2 to 6 pixels.

    Returns:
        What is seen at each pixel, (N, 64, 64), uint8: 0, the ground, or the number of a piece; and
        each one's colours (N, 3), of which the ground's are all 0.
    """
    x, y = _grid()
    layers = torch.zeros(count, SIDE, SIDE, dtype=torch.uint8)
    colours = [torch.zeros(count, 3)]
    for _ in range(pieces):
        middle = SIDE * _uniform(generator, 2, count, 1, 1)
        extent = 1 + 2 * _uniform(generator, 2, count, 1, 1)
        across, down = ((x - middle[0]).abs() < extent[0], (y - middle[1]).abs() < extent[1])
        layers[across & down] = len(colours)
        colours.append(_uniform(generator, count, 3))
    return layers, colours


def _inside(boxes: Tensor, labels: Tensor) -> Tensor:
    """Which pixels belong to the shape that fills each box: (N, 64, 64), bool."""
    x, y = _grid()
    left, top, right, bottom = boxes.view(-1, 4, 1, 1).unbind(1)
    # -1 to 1 inside the box.
    across = (2 * x - left - right) / (right - left).clamp(min=1)
    down = (2 * y - top - bottom) / (bottom - top).clamp(min=1)
    in_box = torch.maximum(across.abs(), down.abs()) <= 1
    shapes = [
        across.square() + down.square() <= 1,
        in_box,
        in_box & (across.abs() <= (1 + down) / 2),
        in_box & (torch.minimum(across.abs(), down.abs()) <= 0.35),
    ]
    return functools.reduce(
        torch.logical_or, [(labels == i).view(-1, 1, 1) & shape for i, shape in enumerate(shapes)]
    )


# -- detection loop --------------------------------------------------------------------------------
# What all detectors share: batches of scenes, the learning rate, mean average precision.

TRAIN, HELD_OUT = 1500, 300
"""Scenes."""
DATA = f"generated: 64x64 scenes of one to four shapes; {TRAIN} to train on, {HELD_OUT} held out"


def batches(seed: int, size: int, device: torch.device) -> Iterator[Scenes]:
    """Without an end; half of the scenes are mirrored."""
    generator = torch.Generator().manual_seed(seed)
    data = scenes(TRAIN, seed=1)
    while True:
        for chosen in torch.randperm(TRAIN, generator=generator).split(size):
            flipped = torch.rand(len(chosen), generator=generator) < 0.5
            yield _mirrored(data[chosen], flipped).to(device)


def _mirrored(data: Scenes, flipped: Tensor) -> Scenes:
    images = torch.where(flipped.view(-1, 1, 1, 1), data.images.flip(3), data.images)
    left, top, right, bottom = data.boxes.unbind(-1)
    mirrored = torch.stack([1 - right, top, 1 - left, bottom], dim=-1)
    return Scenes(images, torch.where(flipped.view(-1, 1, 1), mirrored, data.boxes), data.labels)


def rate(step: int, steps: int, warm_up: int) -> float:
    """Of the learning rate: a warm-up, then a tenth from two thirds and from five sixths on."""
    decay = 0.1 ** ((step >= 2 * steps // 3) + (step >= 5 * steps // 6))
    return float(min(1.0, (step + 1) / warm_up) * decay)


def rising(steps: int, warm_up: int) -> Callable[[Any], torch.optim.lr_scheduler.LRScheduler]:
    """The schedule of `rate`."""
    factor = functools.partial(rate, steps=steps, warm_up=warm_up)
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def precision(found: Sequence[boxes.Found], data: Scenes) -> float:
    """The mean average precision, in percent, of what was found in each scene.

    Args:
        found: boxes in shares of the image's side, labels that are indices into SHAPES.
    """
    there = [
        boxes.Found(box[label >= 0], label[label >= 0], torch.ones_like(label[label >= 0]))
        for box, label in zip(data.boxes, data.labels, strict=True)
    ]
    return 100 * boxes.mean_average_precision(found, there, range(len(SHAPES)))
