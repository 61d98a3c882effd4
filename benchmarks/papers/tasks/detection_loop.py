"""What all detectors share: batches of scenes, the learning rate, mean average precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import boxes
from .detection_data import SHAPES, Scenes, scenes

__all__ = ["DATA", "HELD_OUT", "batches", "precision", "rate"]

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
