"""Detection by torchvision's own detectors: a RetinaNet and an SSDlite, on the scenes of the SSD.

The code of the detectors, of their losses and of their answers is torchvision's; what is small is
the backbones, which are built of torchvision's blocks and start from random weights. The rows are
trained where torchvision can be imported.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.ways import Trainer
from benchmarks.papers import boxes
from benchmarks.papers.task import Metrics, OneModel, Task
from benchmarks.papers.tasks.detection_data import (
    DATA,
    HELD_OUT,
    SHAPES,
    SIDE,
    Scenes,
    batches,
    precision,
    rising,
    scenes,
)

CLASSES = len(SHAPES) + 1
"""0 is the ground, which RetinaNet has no use for."""
_IMAGES: dict[str, Any] = {
    # The scenes are near -1 to 1, and of the size that the detectors take: in training, nothing is
    # resized, which torchvision does image by image in Python.
    "image_mean": [0.0] * 3, "image_std": [1.0] * 3, "_skip_resize": True,
}  # fmt: skip


def retinanet() -> nn.Module:
    """With a feature pyramid of three levels, and GroupNorm in the heads as in torchvision's second
    version: the first one's start from weights for 256 channels, and narrow ones vanish.
    """
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.backbone_utils import BackboneWithFPN
    from torchvision.models.detection.retinanet import RetinaNetHead
    from torchvision.ops import Conv2dNormActivation

    def stage(inner: int, outer: int) -> nn.Module:
        first = Conv2dNormActivation(inner, outer, stride=2)
        return nn.Sequential(first, Conv2dNormActivation(outer, outer))

    stages = {"stem": Conv2dNormActivation(3, 16, stride=2), "layer1": stage(16, 32),
              "layer2": stage(32, 48), "layer3": stage(48, 64)}  # fmt: skip
    levels = {"layer2": "0", "layer3": "1"}  # and a pooled one above them
    backbone = BackboneWithFPN(nn.Sequential(OrderedDict(stages)), levels, [48, 64], 32)
    anchors = AnchorGenerator(((14, 18), (23, 29), (36, 42)), ((0.6, 1.0, 1.7),) * 3)
    norm = functools.partial(nn.GroupNorm, 4)
    head = RetinaNetHead(32, anchors.num_anchors_per_location()[0], CLASSES, norm_layer=norm)
    return RetinaNet(backbone, CLASSES, min_size=SIDE, max_size=SIDE, anchor_generator=anchors,
                     head=head, score_thresh=0.01, **_IMAGES)  # fmt: skip


def ssdlite() -> nn.Module:
    """Of inverted residuals with depthwise convolutions; boxes at places of three maps."""
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
    from torchvision.models.detection.ssd import SSD
    from torchvision.models.detection.ssdlite import SSDLiteHead
    from torchvision.models.mobilenetv2 import InvertedResidual
    from torchvision.ops import Conv2dNormActivation

    stages = {
        "stem": Conv2dNormActivation(3, 16, stride=2, activation_layer=nn.ReLU6),
        "layer1": InvertedResidual(16, 24, stride=2, expand_ratio=4),
        "layer2": nn.Sequential(InvertedResidual(24, 32, stride=2, expand_ratio=4),
                                InvertedResidual(32, 32, stride=1, expand_ratio=4)),
        "layer3": InvertedResidual(32, 48, stride=2, expand_ratio=4),
        "layer4": InvertedResidual(48, 48, stride=2, expand_ratio=2),
    }  # fmt: skip
    maps = {"layer2": "0", "layer3": "1", "layer4": "2"}
    backbone = IntermediateLayerGetter(nn.Sequential(OrderedDict(stages)), maps)
    anchors = DefaultBoxGenerator([[2]] * 3, scales=[0.24, 0.4, 0.58, 0.7])
    norm = nn.BatchNorm2d
    head = SSDLiteHead([32, 48, 48], anchors.num_anchors_per_location(), CLASSES, norm)
    return SSD(backbone, anchors, (SIDE, SIDE), CLASSES, head=head, score_thresh=0.01, **_IMAGES)


BATCH = 8
WARM_UP = 60
"""The steps in which the learning rate rises."""

Targets = list[dict[str, Tensor]]


class _Training(OneModel):
    def __init__(
        self, trainer: Trainer, seed: int, build: Callable[[], nn.Module], top: float, steps: int
    ) -> None:
        adam = functools.partial(torch.optim.AdamW, lr=top, weight_decay=1e-4)
        super().__init__(trainer, seed, build(), adam, schedule=rising(steps, WARM_UP))

    def _draw(self, seed: int) -> Iterator[tuple[list[Tensor], Targets]]:
        for batch in batches(seed, BATCH, self._device):
            yield [*batch.images], targets(batch)

    def _loss(self, images: list[Tensor], wanted: Targets) -> Tensor:
        return _sum(self._net(images, wanted))

    @torch.no_grad()
    def judge(self) -> Metrics:
        data = scenes(HELD_OUT, seed=2)
        net = self._net.eval()
        losses, found = [], []
        for start in range(0, HELD_OUT, 50):
            batch = data[start : start + 50].to(self._device)
            # Losses are what a detector answers in training; its layers remain in evaluation.
            net.training = True
            losses.append(_sum(net.forward([*batch.images], targets(batch))).item())
            net.training = False
            found += [_found(one) for one in net.forward([*batch.images])]
        net.train()
        return {"held-out loss": sum(losses) / len(losses), "mAP, %": precision(found, data)}


def targets(batch: Scenes) -> Targets:
    """For each image, its four boxes in pixels and what they hold.

    Where there are fewer, the first one is repeated: each anchor looks for a box that it overlaps
    most, and no loss is another if that is there twice. So all batches have the same shapes, and
    torch.compile, which makes graphs for one box apart from those for several, need not make some
    for each combination of eight images.
    """
    there = batch.labels >= 0
    index = torch.where(there, torch.arange(there.shape[1], device=there.device),
                        there.int().argmax(1, keepdim=True))  # fmt: skip
    corners = batch.boxes.gather(1, index.unsqueeze(-1).expand(-1, -1, 4)) * SIDE
    labels = batch.labels.gather(1, index) + 1
    return [{"boxes": box, "labels": label} for box, label in zip(corners, labels, strict=True)]


def _sum(parts: dict[str, Tensor]) -> Tensor:
    return torch.stack([part.float() for part in parts.values()]).sum()


def _found(answer: dict[str, Tensor]) -> boxes.Found:
    corners, labels, scores = (answer[name].cpu() for name in ("boxes", "labels", "scores"))
    return boxes.Found(corners / SIDE, labels - 1, scores)


def _task(name: str, build: Callable[[], nn.Module], top: float, steps: int) -> Task:
    """`top`: the highest learning rate."""
    return Task(
        name=name,
        claim="detection",
        data=DATA,
        metric="mAP, %",
        higher=True,
        steps=steps,
        start=functools.partial(_Training, build=build, top=top, steps=steps),
        needs=("torchvision",),
    )


RETINANET = _task("torchvision's RetinaNet", retinanet, top=2e-3, steps=1000)
SSDLITE = _task("torchvision's SSDlite", ssdlite, top=4e-3, steps=800)
