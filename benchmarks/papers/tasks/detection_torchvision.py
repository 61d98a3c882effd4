"""Detection by torchvision's own detectors: an SSD and a Faster R-CNN, on our own SSD's scenes.

The code of the detectors, of their losses and of their answers is torchvision's; what is small is
the backbones, which are built of torchvision's blocks and start from random weights. The rows are
trained where torchvision can be imported.
"""

from __future__ import annotations

import functools
import itertools
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
"""0 is the ground."""
_IMAGES: dict[str, Any] = {
    # The scenes are near -1 to 1, and of the size that the detectors take: in training, nothing is
    # resized, which torchvision does image by image in Python.
    "image_mean": [0.0] * 3, "image_std": [1.0] * 3, "_skip_resize": True,
}  # fmt: skip


class VGG(nn.Module):
    """The stages of VGG with batch norm, two convolutions and a pool each, narrow.

    Boxes are read from its maps at strides 8, 16 and 32, of 48, 64 and 64 channels; the first one
    is normalised over its channels and scaled, as the SSD's is.
    """

    def __init__(self) -> None:
        from torchvision.ops import Conv2dNormActivation as norm_conv

        super().__init__()
        widths = (3, 16, 32, 48, 64, 64)
        self.stages = nn.ModuleList(
            nn.Sequential(norm_conv(a, b), norm_conv(b, b), nn.MaxPool2d(2))
            for a, b in itertools.pairwise(widths)
        )
        self.scale = nn.Parameter(torch.full((48, 1, 1), 20.0))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps = []
        x = images
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        first = self.scale * nn.functional.normalize(maps[2])
        return {"0": first, "1": maps[3], "2": maps[4]}


def ssd() -> nn.Module:
    """The head and the loss of `ssd300_vgg16`, which has three maps more for images of 300 px."""
    from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
    from torchvision.models.detection.ssd import SSD, SSDHead

    anchors = DefaultBoxGenerator([[2]] * 3, scales=[0.24, 0.4, 0.58, 0.7])
    head = SSDHead([48, 64, 64], anchors.num_anchors_per_location(), CLASSES)
    return SSD(VGG(), anchors, (SIDE, SIDE), CLASSES, head=head, score_thresh=0.01, **_IMAGES)


def faster_rcnn() -> nn.Module:
    """Regions are proposed from one map of stride 8; two linear layers classify each."""
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.ops import Conv2dNormActivation, MultiScaleRoIAlign

    widths = (3, 16, 32, 64)
    stages = [Conv2dNormActivation(a, b, stride=2) for a, b in itertools.pairwise(widths)]
    backbone = nn.Sequential(*stages, Conv2dNormActivation(64, 64))
    backbone.out_channels = 64  # what torchvision asks of a backbone
    return FasterRCNN(
        backbone, min_size=SIDE, max_size=SIDE,
        rpn_anchor_generator=AnchorGenerator(((14, 23, 36),), ((0.6, 1.0, 1.7),)),
        rpn_pre_nms_top_n_train=200, rpn_post_nms_top_n_train=100,
        rpn_pre_nms_top_n_test=200, rpn_post_nms_top_n_test=50,
        box_roi_pool=MultiScaleRoIAlign(["0"], 5, 2), box_head=TwoMLPHead(64 * 25, 128),
        box_predictor=FastRCNNPredictor(128, CLASSES), box_batch_size_per_image=64,
        box_score_thresh=0.01, **_IMAGES,
    )  # fmt: skip


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
        # Losses are what a detector answers in training; its layers remain in evaluation.
        parts = [part for name, part in net.named_modules() if name in ("", "rpn", "roi_heads")]
        losses, found = [], []
        with torch.random.fork_rng():
            torch.manual_seed(2)  # a Faster R-CNN draws the regions that it judges
            for start in range(0, HELD_OUT, 50):
                batch = data[start : start + 50].to(self._device)
                for training in (True, False):
                    for part in parts:
                        part.training = training
                    if training:
                        answer = net.forward([*batch.images], targets(batch))
                        losses.append(_sum(answer).item())
                    else:
                        found += [_found(one) for one in net.forward([*batch.images])]
        net.train()
        return {"held-out loss": sum(losses) / len(losses), "mAP, %": precision(found, data)}


def targets(batch: Scenes) -> Targets:
    """For each image, its four boxes in pixels and what they hold.

    Where there are fewer, the first one is repeated: each anchor looks for a box that it overlaps
    most, and no loss of an SSD is another if that is there twice (a Faster R-CNN is proposed it
    more often). So all batches have the same shapes, and torch.compile, which makes graphs for one
    box apart from those for several, need not make some for each combination of eight images.
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


SSD300 = _task("torchvision's SSD", ssd, top=2e-3, steps=800)
FASTER_RCNN = _task("torchvision's Faster R-CNN", faster_rcnn, top=2e-3, steps=800)
