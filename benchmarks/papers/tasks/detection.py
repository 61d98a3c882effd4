"""Detection: an SSD on generated scenes.

The detector is that of "SSD: Single Shot MultiBox Detector" (Liu et al., 2016): a backbone as VGG's
without batch norm whose last layers are convolutions, L2Norm on the first of the feature maps,
prior boxes of several scales and shapes, hard negative mining. The paper's backbone is trained on
ImageNet before; this one starts from He's weights, since Xavier's shrink from layer to layer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.ways import Trainer
from benchmarks.papers import boxes
from benchmarks.papers.task import Metrics, OneModel, Probe, Task
from benchmarks.papers.tasks import detection_data

CLASSES = len(detection_data.SHAPES) + 1
"""0 is the ground."""
MAPS = ((16, 10, (1, 2)), (8, 19, (1, 2, 3)), (4, 28, (1, 2, 3)), (2, 37, (1, 2)), (1, 46, (1,)))
"""Of each feature map: its side, the size of its priors in pixels, their aspect ratios."""
NEXT = 9
"""How much larger the priors of the next map are."""


def _priors_at(ratios: tuple[int, ...]) -> int:
    """The ratio 1 in two sizes, every other one upright and lying."""
    return 2 * len(ratios)


def prior_boxes() -> Tensor:
    """(P, 4), centred, in shares of the image's side; in the order of the detector's answers."""
    found = []
    for side, size, ratios in MAPS:
        shapes = [(size, size), (math.sqrt(size * (size + NEXT)),) * 2]
        for ratio in ratios[1:]:
            root = math.sqrt(ratio)
            shapes += [(size * root, size / root), (size / root, size * root)]
        line = (torch.arange(side) + 0.5) / side
        y, x = torch.meshgrid(line, line, indexing="ij")
        middle = torch.stack([x, y], dim=-1).view(-1, 1, 2).expand(-1, len(shapes), -1)
        extent = (torch.tensor(shapes) / detection_data.SIDE).expand(side * side, -1, -1)
        found.append(torch.cat([middle, extent], dim=-1).view(-1, 4))
    return torch.cat(found)


class _L2Norm(nn.Module):
    """Each pixel of (B, C, H, W) is divided by its norm over C; a learned scale per channel.

    The scale starts at the paper's 20 for 512 channels: numbers are as large with fewer of them.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((channels, 1, 1), 20 * math.sqrt(channels / 512)))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * self.weight


def _conv(inner: int, outer: int, kernel: int = 3, stride: int = 1, dilation: int = 1) -> nn.Module:
    padding = dilation * (kernel // 2)
    return nn.Sequential(nn.Conv2d(inner, outer, kernel, stride, padding, dilation), nn.ReLU())


class Detector(nn.Module):
    """Images (B, 3, 64, 64) -> answers for each prior: boxes (B, P, 4), logits (B, P, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Sequential(
            _conv(3, 12), nn.MaxPool2d(2),
            _conv(12, 24), nn.MaxPool2d(2),
            _conv(24, 32), _conv(32, 32),
        )  # fmt: skip
        self.norm = _L2Norm(32)
        self.higher = nn.ModuleList(
            [
                nn.Sequential(
                    nn.MaxPool2d(2), _conv(32, 48), _conv(48, 48),
                    _conv(48, 64, dilation=2), _conv(64, 64, kernel=1),  # VGG's fc6 and fc7
                ),
                nn.Sequential(_conv(64, 32, kernel=1), _conv(32, 64, stride=2)),
                nn.Sequential(_conv(64, 24, kernel=1), _conv(24, 48, stride=2)),
                nn.Sequential(_conv(48, 24, kernel=1), _conv(24, 48, stride=2)),
            ]
        )  # fmt: skip
        widths, counts = (32, 64, 64, 48, 48), [_priors_at(ratios) for _, _, ratios in MAPS]
        self.places = nn.ModuleList(
            nn.Conv2d(width, 4 * count, 3, padding=1)
            for width, count in zip(widths, counts, strict=True)
        )
        self.classes = nn.ModuleList(
            nn.Conv2d(width, CLASSES * count, 3, padding=1)
            for width, count in zip(widths, counts, strict=True)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.low(images)
        maps = [self.norm(x)]
        for stage in self.higher:
            x = stage(x)
            maps.append(x)
        return _answers(self.places, maps, 4), _answers(self.classes, maps, CLASSES)


def _answers(heads: nn.ModuleList, maps: list[Tensor], numbers: int) -> Tensor:
    answers = [head(x).permute(0, 2, 3, 1) for head, x in zip(heads, maps, strict=True)]
    return torch.cat([answer.reshape(len(answer), -1, numbers) for answer in answers], dim=1)


def multibox_loss(places: Tensor, logits: Tensor, aims: Tensor, classes: Tensor) -> Tensor:
    """SSD's loss: smooth L1 of boxes and cross entropy of classes, over the matched priors' number.

    Of the priors that match nothing, the three times as many as are matched count whose cross
    entropy is the largest, image by image.

    Args:
        places, aims: (B, P, 4): answers, and encoded boxes.
        logits: (B, P, classes).
        classes: (B, P), int64; 0: matches nothing.
    """
    matched = classes > 0
    distance = F.smooth_l1_loss(places.float(), aims, reduction="none").sum(-1)
    entropy = F.cross_entropy(logits.float().transpose(1, 2), classes, reduction="none")
    hardness = entropy.detach().masked_fill(matched, 0)
    rank = hardness.argsort(dim=1, descending=True).argsort(dim=1)
    mined = rank < 3 * matched.sum(1, keepdim=True)
    total = (distance * matched).sum() + (entropy * (matched | mined)).sum()
    return total / matched.sum().clamp(min=1)


BATCH = 8
STEPS = 1200
RATE, WARM_UP = 1.5e-2, 300
"""The learning rate, and the steps in which it rises to that."""


class _Training(OneModel):
    def __init__(self, trainer: Trainer, seed: int) -> None:
        self._priors = prior_boxes().to(trainer.device)
        sgd = functools.partial(torch.optim.SGD, lr=RATE, momentum=0.9, weight_decay=5e-4)
        super().__init__(
            trainer, seed, Detector(), sgd, schedule=detection_data.rising(STEPS, WARM_UP)
        )

    def _draw(self, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for batch in detection_data.batches(seed, BATCH, self._device):
            yield batch.images, *self._targets(batch)

    def _targets(self, batch: detection_data.Scenes) -> tuple[Tensor, Tensor]:
        """Of each prior: the encoded box (B, P, 4), the class (B, P)."""
        present = batch.labels >= 0
        taken = boxes.match(batch.boxes, present, boxes.corners(self._priors))
        index = taken.clamp(min=0)
        classes = (batch.labels.gather(1, index) + 1).masked_fill(taken < 0, 0)
        wanted = boxes.centred(batch.boxes).gather(1, index.unsqueeze(-1).expand(-1, -1, 4))
        # A prior that matches nothing has itself as its aim: the loss leaves it out.
        wanted = torch.where((taken < 0).unsqueeze(-1), self._priors, wanted)
        return boxes.encode(wanted, self._priors), classes

    def _loss(self, images: Tensor, aims: Tensor, classes: Tensor) -> Tensor:
        return multibox_loss(*self._net(images), aims, classes)

    def probe(self) -> Probe:
        images, aims, classes = next(self._batches)
        return Probe(self._net, (images,), lambda result: multibox_loss(*result, aims, classes))

    @torch.no_grad()
    def judge(self) -> Metrics:
        data = detection_data.scenes(detection_data.HELD_OUT, seed=2)
        losses, found = [], []
        for start in range(0, detection_data.HELD_OUT, 50):
            batch = data[start : start + 50].to(self._device)
            places, logits = self._net.forward(batch.images)
            losses.append(multibox_loss(places, logits, *self._targets(batch)).item())
            found += _found(boxes.decode(places, self._priors).cpu(), logits.softmax(-1).cpu())
        return {
            "held-out loss": sum(losses) / len(losses),
            "mAP, %": detection_data.precision(found, data),
        }


def _found(answers: Tensor, chances: Tensor, most: int = 100) -> list[boxes.Found]:
    """What stays of the best 100 of each class whose chance is above 0.01, image by image.

    Args:
        answers: centred (B, P, 4).
        chances: (B, P, classes).
    """
    scores, chosen = chances[..., 1:].transpose(1, 2).topk(most)  # (B, shapes, 100)
    rows = torch.arange(len(answers)).view(-1, 1, 1)
    best = boxes.corners(answers)[rows, chosen]
    stays = boxes.suppress(best) & (scores > 0.01)
    return [
        boxes.Found(box[stay], stay.nonzero()[:, 0], score[stay])
        for box, score, stay in zip(best, scores, stays, strict=True)
    ]


SSD = Task(
    name="SSD",
    claim="detection",
    data=detection_data.DATA,
    metric="mAP, %",
    higher=True,
    steps=STEPS,
    start=_Training,
)
