"""torchvision's models: detection, segmentation, classification, optical flow, video.

A batch is a dict of tensors of one size; the losses here make of it what each model is called with:
a list of images and their targets, a pair of images, a clip.

Where a detector chooses by score, it is told to keep everything: it suppresses no box, samples no
anchor and mines no negative. Otherwise a rounding would choose other boxes, and two gradients would
differ by what was chosen, not by how exactly it was computed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.making import Entry, Inputs, labelled, to_be_compared

_CLASSES = 5
Draw = Callable[[torch.Generator, int], Inputs]


def _entry(
    kind: str,
    build: Callable[[], nn.Module],
    draw: Draw,
    loss: Callable[[nn.Module, Inputs], Tensor],
    sizes: Sequence[int],
) -> Entry:
    """`sizes` are the sides of images: the usual one, and all that come one after the other."""
    usual, *others = (functools.partial(draw, size=size) for size in sizes)
    return Entry(kind, lambda: to_be_compared(build()), usual, loss, tuple(others))


def _named(path: str, **settings: Any) -> Callable[[], nn.Module]:
    """A class, or a function for one of its variants, by its path below `torchvision.models`."""

    def build() -> nn.Module:
        make = operator.attrgetter(path)(importlib.import_module("torchvision.models"))
        model: nn.Module = make(num_classes=_CLASSES, **settings)
        return model

    return build


def _in_bf16(entry: Entry) -> Entry:
    """For large convolutions: a CPU without FP16 units takes twenty times as long in FP16."""
    return dataclasses.replace(entry, low=torch.bfloat16)


def _growing(size: int, steps: int = 10) -> range:
    """The usual size, and `steps` others."""
    return range(size, size + 8 * (steps + 1), 8)


# -- classification --------------------------------------------------------------------------------


_labelled = functools.partial(labelled, classes=_CLASSES)


def _cross_entropy(model: nn.Module, inputs: Inputs) -> Tensor:
    """Of the class, by the head and by those beside it, which count for 0.3 of it."""
    answers = model(inputs["x"])
    head, *beside = answers if isinstance(answers, tuple) else (answers,)
    loss = F.cross_entropy(head, inputs["labels"])
    return loss + sum(0.3 * F.cross_entropy(logits, inputs["labels"]) for logits in beside)


def _classifier(name: str, sizes: Sequence[int], rows: int, **settings: Any) -> Entry:
    draw = functools.partial(_labelled, rows=rows)
    return _entry("classification", _named(name, **settings), draw, _cross_entropy, sizes)


_WITH_HEADS_BESIDE = {"aux_logits": True, "init_weights": True}
CLASSIFIERS = {
    "googlenet": _classifier("GoogLeNet", _growing(65), 4, **_WITH_HEADS_BESIDE),
    # Its auxiliary head takes no smaller ones.
    "inception_v3": _in_bf16(_classifier("Inception3", [299] * 3, 3, **_WITH_HEADS_BESIDE)),
    "densenet": _classifier("DenseNet", _growing(65), 8, growth_rate=6,
                            block_config=(2, 2, 2, 2), num_init_features=18),
    "efficientnet_b0": _classifier("efficientnet_b0", _growing(65), 4, weights=None),
    # Of one size: torch takes minutes to trace its windows for unknown ones.
    "swin": _classifier("SwinTransformer", [33] * 11, 4, patch_size=[3, 3], embed_dim=12,
                        depths=[2, 2], num_heads=[2, 3], window_size=[3, 3]),
}  # fmt: skip


# -- detection -------------------------------------------------------------------------------------


def _objects(generator: torch.Generator, size: int, rows: int = 2, masks: bool = False) -> Inputs:
    """Images with three objects each: boxes in pixels, corners; with masks, filled rectangles."""
    corner = torch.rand(rows, 3, 2, generator=generator) * size / 2
    extent = (0.2 + 0.25 * torch.rand(rows, 3, 2, generator=generator)) * size
    inputs = {
        "images": torch.rand(rows, 3, size, size, generator=generator),
        "boxes": torch.cat([corner, corner + extent], dim=-1),
        "labels": torch.randint(1, _CLASSES, (rows, 3), generator=generator),
    }
    if masks:
        at = torch.arange(size) + 0.5
        left, top, right, bottom = inputs["boxes"].unsqueeze(-1).unbind(2)
        across, down = (left < at) & (at < right), (top < at) & (at < bottom)
        inputs["masks"] = (down.unsqueeze(-1) & across.unsqueeze(-2)).byte()
    return inputs


def _detection_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    """The sum of what the model says it has lost; it is called with lists."""
    about = {name: values.unbind() for name, values in inputs.items() if name != "images"}
    targets = [dict(zip(about, each, strict=True)) for each in zip(*about.values(), strict=True)]
    losses: Mapping[str, Tensor] = model(list(inputs["images"]), targets)
    return sum(losses.values(), torch.zeros(()))


def _detector(
    build: Callable[[], nn.Module], sizes: Sequence[int] = _growing(64), **drawn: Any
) -> Entry:
    draw = functools.partial(_objects, **drawn)
    return _entry("detection", build, draw, _detection_loss, sizes)


_PYRAMID, _LEVELS = 32, 4
"""Channels of a feature pyramid, and its levels."""


def _backbone() -> nn.Module:
    """A residual network of four blocks, its norms frozen as detectors' usually are, with a feature
    pyramid and one more level above it.
    """
    from torchvision.models.detection.backbone_utils import BackboneWithFPN
    from torchvision.models.resnet import BasicBlock, ResNet
    from torchvision.ops import FrozenBatchNorm2d

    body = ResNet(BasicBlock, [1, 1, 1, 1], norm_layer=FrozenBatchNorm2d)
    layers = {f"layer{number}": str(number) for number in (2, 3, 4)}
    return BackboneWithFPN(body, layers, [128, 256, 512], _PYRAMID)


def _anchors(aspects: tuple[float, ...]) -> nn.Module:
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    return AnchorGenerator(tuple((8 * 2**k,) for k in range(_LEVELS)), (aspects,) * _LEVELS)


_ALL = 10_000
"""More than there are of anything that is sampled."""
_SIZES: Mapping[str, Any] = {"min_size": 64, "max_size": 160}
_TWO_STAGES: Mapping[str, Any] = {
    **_SIZES, "rpn_pre_nms_top_n_train": _ALL, "rpn_post_nms_top_n_train": _ALL,
    "rpn_nms_thresh": 1.0, "rpn_batch_size_per_image": _ALL, "box_batch_size_per_image": _ALL,
    "rpn_positive_fraction": 1.0, "box_positive_fraction": 1.0,
}  # fmt: skip


def _on_pyramid(
    name: str, anchors: str, aspects: tuple[float, ...] = (1.0,), **settings: Any
) -> Callable[[], nn.Module]:
    """A detector with the backbone above; `anchors` is what it calls the maker of its anchors."""

    def build() -> nn.Module:
        given = {"backbone": _backbone(), anchors: _anchors(aspects), **settings}
        return _named(f"detection.{name}", **given)()

    return build


_UNTRAINED = {"weights": None, "weights_backbone": None}
_EVERY_NEGATIVE = {**_UNTRAINED, "positive_fraction": 1 / _ALL}

DETECTORS = {
    "faster_rcnn": _detector(_on_pyramid("FasterRCNN", "rpn_anchor_generator", **_TWO_STAGES)),
    "mask_rcnn": _detector(_on_pyramid("MaskRCNN", "rpn_anchor_generator", **_TWO_STAGES),
                           masks=True),
    "retinanet": _detector(_on_pyramid("RetinaNet", "anchor_generator", (0.5, 1.0, 2.0), **_SIZES)),
    "fcos": _detector(_on_pyramid("FCOS", "anchor_generator", **_SIZES)),
    # Scaled to 300, whatever comes.
    "ssd300": _in_bf16(_detector(_named("detection.ssd300_vgg16", **_EVERY_NEGATIVE),
                                 _growing(300, 3), rows=1)),
    "ssdlite": _detector(_named("detection.ssdlite320_mobilenet_v3_large", **_EVERY_NEGATIVE),
                         _growing(320)),
}  # fmt: skip


# -- segmentation ----------------------------------------------------------------------------------


def _segmented(generator: torch.Generator, size: int) -> Inputs:
    """Images, and a class for each pixel."""
    return {
        "x": torch.randn(4, 3, size, size, generator=generator),
        "labels": torch.randint(_CLASSES, (4, size, size), generator=generator),
    }


def _pixels(model: nn.Module, inputs: Inputs) -> Tensor:
    loss: Tensor = F.cross_entropy(model(inputs["x"])["out"], inputs["labels"])
    return loss


def _segmenter(name: str) -> Entry:
    build = _named(f"segmentation.{name}", **_UNTRAINED)
    return _entry("segmentation", build, _segmented, _pixels, _growing(65))


SEGMENTERS = {
    "deeplabv3": _in_bf16(_segmenter("deeplabv3_mobilenet_v3_large")),  # 960 channels, dilated
    "lraspp": _segmenter("lraspp_mobilenet_v3_large"),
}


# -- optical flow ----------------------------------------------------------------------------------


def _pair(generator: torch.Generator, size: int) -> Inputs:
    """Two images, and how each pixel of the first moves, in pixels."""
    first, second = torch.rand(2, 1, 3, size, size, generator=generator) * 2 - 1
    return {"first": first, "second": second,
            "flow": torch.randn(1, 2, size, size, generator=generator)}  # fmt: skip


def _raft() -> nn.Module:
    """Its grid of pixels is FP32 in FP64, too, which its operators don't take together: up to the
    first sum with a flow, where it becomes FP64, it is made so here.
    """
    from torchvision.models.optical_flow import raft_small
    from torchvision.models.optical_flow.raft import CorrBlock

    class Indexed(CorrBlock):
        def index_pyramid(self, centroids_coords: Tensor) -> Tensor:
            return super().index_pyramid(_as_wide(centroids_coords, self.corr_pyramid[0]))

    def widen(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        *features, flow = args
        return (*features, _as_wide(flow, features[-1]))

    model = raft_small(weights=None, corr_block=Indexed(num_levels=4, radius=3))
    model.update_block.register_forward_pre_hook(widen)
    return model


def _as_wide(x: Tensor, other: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, other.dtype))


def _flow_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    """The paper's: each refinement's distance, a later one's with more weight."""
    flows = model(inputs["first"], inputs["second"], num_flow_updates=3)
    off = [(flow - inputs["flow"]).abs().mean() for flow in flows]
    return torch.stack([0.8 ** (len(off) - k) * each for k, each in enumerate(off, 1)]).sum()


FLOWS = {"raft": _entry("optical flow", _raft, _pair, _flow_loss, _growing(128))}


# -- video -----------------------------------------------------------------------------------------


def _r3d() -> nn.Module:
    from torchvision.models.video.resnet import BasicBlock, BasicStem, Conv3DSimple, VideoResNet

    return VideoResNet(BasicBlock, [Conv3DSimple] * 4, [1, 1, 1, 1], BasicStem, _CLASSES)


def _mvit() -> nn.Module:
    """Two of version 2's blocks, the second of which halves the image's sides."""
    from torchvision.models.video import MViT
    from torchvision.models.video.mvit import MSBlockConfig

    blocks = [
        MSBlockConfig(num_heads=heads, input_channels=channels, output_channels=36,
                      kernel_q=[3, 3, 3], kernel_kv=[3, 3, 3], stride_q=[1, stride, stride],
                      stride_kv=[1, 2, 2])
        for heads, channels, stride in ((2, 18, 1), (3, 36, 2))
    ]  # fmt: skip
    return MViT((36, 36), 4, blocks, residual_pool=True, residual_with_cls_embed=False,
                rel_pos_embed=True, proj_after_attn=True, num_classes=_CLASSES)  # fmt: skip


def _video(build: Callable[[], nn.Module], sizes: Sequence[int]) -> Entry:
    draw = functools.partial(_labelled, rows=2, frames=4)
    return _entry("video", build, draw, _cross_entropy, sizes)


VIDEOS = {"r3d": _video(_r3d, _growing(33)), "mvit": _video(_mvit, [36] * 11)}

TORCHVISION = {**DETECTORS, **SEGMENTERS, **CLASSIFIERS, **FLOWS, **VIDEOS}
