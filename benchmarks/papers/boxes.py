"""Boxes of detectors: overlap, matching, coding, suppression, average precision.

A box is 4 numbers in FP32. *Corners* are (left, top, right, bottom); *centred* is (x, y, width,
height) with the centre's x and y. The unit is any, as long as it is the same for both sides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

VARIANCES = (0.1, 0.1, 0.2, 0.2)
"""What SSD divides encoded boxes by: of x, y, width, height."""


def corners(boxes: Tensor) -> Tensor:
    """Centred (..., 4) -> corners (..., 4)."""
    middle, size = boxes.split(2, dim=-1)
    return torch.cat([middle - size / 2, middle + size / 2], dim=-1)


def centred(boxes: Tensor) -> Tensor:
    """Corners (..., 4) -> centred (..., 4)."""
    low, high = boxes.split(2, dim=-1)
    return torch.cat([(low + high) / 2, high - low], dim=-1)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of corners (..., N, 4) and (..., M, 4): (..., N, M), 0 to 1.

    0 for two boxes without an area.
    """
    a, b = a.unsqueeze(-2), b.unsqueeze(-3)
    low = torch.maximum(a[..., :2], b[..., :2])
    high = torch.minimum(a[..., 2:], b[..., 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (a, b)]
    return shared / (areas[0] + areas[1] - shared).clamp(min=1e-12)


def match(objects: Tensor, present: Tensor, priors: Tensor, threshold: float = 0.5) -> Tensor:
    """Which object each prior is to find: (B, P), int64; -1: none.

    As in SSD: a prior takes the object that it overlaps most if they overlap by the threshold, and
    each object has the prior that overlaps it most, whatever the threshold says.

    Args:
        objects: (B, K, 4), corners.
        present: (B, K), bool: which of them there are.
        priors: (P, 4), corners.
    """
    overlap = iou(objects, priors).masked_fill(~present.unsqueeze(-1), -1)  # (B, K, P)
    best, taken = overlap.max(1)
    taken = taken.masked_fill(best < threshold, -1)
    favourite = overlap.argmax(2)
    for k in range(objects.shape[1]):
        rows = present[:, k].nonzero().squeeze(1)
        taken[rows, favourite[rows, k]] = k
    return taken


def encode(boxes: Tensor, priors: Tensor) -> Tensor:
    """What a detector is to answer: centred boxes (..., P, 4), seen from centred priors (P, 4)."""
    middle = (boxes[..., :2] - priors[:, :2]) / priors[:, 2:]
    size = (boxes[..., 2:] / priors[:, 2:]).log()
    return torch.cat([middle, size], dim=-1) / boxes.new_tensor(VARIANCES)


def decode(answers: Tensor, priors: Tensor) -> Tensor:
    """The inverse of `encode`."""
    answers = answers * answers.new_tensor(VARIANCES)
    middle = priors[:, :2] + answers[..., :2] * priors[:, 2:]
    return torch.cat([middle, priors[:, 2:] * answers[..., 2:].exp()], dim=-1)


def suppress(boxes: Tensor, threshold: float = 0.45) -> Tensor:
    """Which boxes stay: (..., K), bool.

    A box goes if it overlaps one that stays, and that comes before it, by more than the threshold.

    Args:
        boxes: (..., K, 4), corners, the best first.
    """
    covers = iou(boxes, boxes) > threshold
    stays = torch.ones(boxes.shape[:-1], dtype=torch.bool, device=boxes.device)
    for k in range(boxes.shape[-2] - 1):
        stays[..., k + 1 :] &= ~(stays[..., k, None] & covers[..., k, k + 1 :])
    return stays


@dataclasses.dataclass(frozen=True)
class Found:
    """What was found in one image, or what is there: boxes (N, 4), corners; labels (N,), int64.

    scores: (N,); of what is there, ones.
    """

    boxes: Tensor
    labels: Tensor
    scores: Tensor

    def of(self, label: int) -> Found:
        chosen = self.labels == label
        return Found(self.boxes[chosen], self.labels[chosen], self.scores[chosen])


def mean_average_precision(
    found: Sequence[Found], there: Sequence[Found], labels: Sequence[int], threshold: float = 0.5
) -> float:
    """The mean over labels of Pascal VOC's average precision, 0 to 1; one of each per image."""
    areas = []
    for label in labels:
        wanted = [image.of(label) for image in there]
        hits = [
            _hits(image.of(label), aim.boxes, threshold)
            for image, aim in zip(found, wanted, strict=True)
        ]
        scores = torch.cat([image.of(label).scores for image in found])
        order = scores.argsort(descending=True, stable=True)
        count = sum(len(aim.boxes) for aim in wanted)
        areas.append(average_precision(torch.cat(hits)[order], count))
    return sum(areas) / len(areas)


def _hits(found: Found, wanted: Tensor, threshold: float) -> Tensor:
    """Which boxes of one image are right: (N,), bool.

    Each looks at the object that it overlaps most. The best box that reaches the threshold is
    right, all others are wrong.
    """
    hits = torch.zeros(len(found.boxes), dtype=torch.bool)
    if not len(wanted) or not len(found.boxes):
        return hits
    best, aims = iou(found.boxes, wanted).max(1)
    open_aims = set(range(len(wanted)))
    for i in found.scores.argsort(descending=True, stable=True).tolist():
        aim = int(aims[i])
        if best[i] >= threshold and aim in open_aims:
            open_aims.remove(aim)
            hits[i] = True
    return hits


def average_precision(hits: Tensor, count: int) -> float:
    """The area below precision over recall, each precision raised to the best at a higher recall.

    Args:
        hits: (N,), bool: whether each find is right, the best score first.
        count: how many there are to find.
    """
    right = hits.double().cumsum(0)
    precision = right / torch.arange(1, len(hits) + 1, dtype=torch.float64)
    raised = precision.flip(0).cummax(0).values.flip(0) if len(hits) else precision
    return float(raised[hits].sum()) / max(count, 1)
