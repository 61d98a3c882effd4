"""timm's image models: convolutions, transformers, mixers, and what lies between."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.making import Entry, Inputs, to_be_compared

_CLASSES, _ROWS = 7, 4


def _entry(kind: str, name: str, size: int, **sizes: Any) -> Entry:
    """`name` is of `timm.models`; images are `size` x `size`."""

    def build() -> nn.Module:
        package = timm()
        make = getattr(package.models, name)  # a class, or a function for one of its variants
        model: nn.Module = make(num_classes=_CLASSES, **sizes)
        return to_be_compared(model)

    def draw(generator: torch.Generator) -> Inputs:
        return {
            "x": torch.randn(_ROWS, 3, size, size, generator=generator),
            "labels": torch.randint(_CLASSES, (_ROWS,), generator=generator),
        }

    return Entry(kind, build, draw, _cross_entropy)


def _cross_entropy(model: nn.Module, inputs: Inputs) -> Tensor:
    logits = model(inputs["x"])
    if isinstance(logits, tuple):  # two heads, one of them for distillation
        logits = sum(logits[1:], logits[0]) / len(logits)
    return F.cross_entropy(logits, inputs["labels"])


_convolutions = functools.partial(_entry, "convolutions")
_transformer = functools.partial(_entry, "transformer")
_mixer = functools.partial(_entry, "mixer")

_FOUR = (12, 18, 36, 60)
_ONE_EACH = (1, 1, 1, 1)
_PATCHES: Mapping[str, Any] = {"img_size": 33, "patch_size": 11, "embed_dim": 36}
_VIT: Mapping[str, Any] = {**_PATCHES, "depth": 2, "num_heads": 3}

TIMM = {
    "resnet10t": _convolutions("resnet10t", 65, channels=_FOUR, stem_width=18),
    "skresnet18": _convolutions("skresnet18", 65, channels=_FOUR, layers=_ONE_EACH),
    "resnest14d": _convolutions("resnest14d", 65, channels=_FOUR),
    "res2net50": _convolutions("res2net50_26w_4s", 65, channels=_FOUR, layers=_ONE_EACH),
    "densenet": _convolutions("densenet121", 65, growth_rate=6, block_config=(2, 2, 2, 2)),
    "mobilenetv3": _convolutions("mobilenetv3_small_050", 65),
    "ghostnet": _convolutions("ghostnet_050", 65),
    "convnext": _convolutions("convnext_atto", 65, dims=_FOUR, depths=_ONE_EACH),
    "convnextv2": _convolutions("convnextv2_atto", 65, dims=_FOUR, depths=_ONE_EACH),
    "convmixer": _convolutions("ConvMixer", 33, dim=36, depth=2, patch_size=5),
    "fastvit": _convolutions("fastvit_t8", 65, embed_dims=(12, 24, 48, 96), layers=_ONE_EACH),
    "focalnet": _convolutions("FocalNet", 65, embed_dim=9, depths=_ONE_EACH),
    "mambaout": _convolutions("mambaout_femto", 65, dims=(12, 18, 36, 60), depths=_ONE_EACH),

    "vit_tiny": _transformer("vit_tiny_patch16_224", 33, **_VIT),
    "deit3": _transformer("deit3_small_patch16_224", 33, **_VIT),
    "eva02": _transformer("eva02_tiny_patch14_224", 33, **_VIT),
    "beit": _transformer("beit_base_patch16_224", 33, **_VIT),
    "cait": _transformer("cait_xxs24_224", 33, **_VIT),
    "xcit": _transformer("xcit_nano_12_p16_224", 48, img_size=48, embed_dim=36, depth=2,
                         num_heads=3),
    "tnt": _transformer("tnt_s_patch16_224", 33, **_PATCHES, depth=2, num_heads_outer=3,
                        inner_dim=12, num_heads_inner=3, first_stride=3),
    "convit": _transformer("convit_tiny", 33, **_VIT),
    "pit": _transformer("pit_ti_224", 33, img_size=33, patch_size=5, stride=3, base_dims=(12,) * 3,
                        depth=(1, 1, 1), heads=(1, 2, 4)),
    "swin": _transformer("swin_tiny_patch4_window7_224", 33, img_size=33, patch_size=3,
                         embed_dim=12, depths=(2, 2), num_heads=(2, 3), window_size=3),
    "pvt_v2": _transformer("pvt_v2_b0", 65, embed_dims=_FOUR, depths=_ONE_EACH,
                           num_heads=(1, 2, 3, 4)),
    "twins": _transformer("twins_pcpvt_small", 64, img_size=64, embed_dims=_FOUR, depths=_ONE_EACH,
                          num_heads=(1, 2, 3, 4)),
    "davit": _transformer("davit_tiny", 65, embed_dims=(12, 24, 36, 60), depths=_ONE_EACH,
                          num_heads=(1, 2, 3, 4), window_size=3),
    "levit": _transformer("levit_128s", 64, img_size=64, embed_dim=(36, 40, 60),
                          num_heads=(2, 3, 4), key_dim=10, depth=(1, 1, 1)),
    "edgenext": _transformer("edgenext_xx_small", 65, dims=(12, 24, 36, 60), depths=(1, 2, 2, 2),
                             heads=(3, 3, 3, 3)),

    "mixer": _mixer("MlpMixer", 33, **_PATCHES, num_blocks=2),
    "poolformer": _mixer("MetaFormer", 65, dims=_FOUR, depths=_ONE_EACH),
    "sequencer2d": _mixer("sequencer2d_s", 35, img_size=35, layers=(1, 1, 1, 1),
                          embed_dims=(18, 36, 36, 36), hidden_sizes=(9, 9, 9, 9)),
}  # fmt: skip


# -- timm import -----------------------------------------------------------------------------------
# timm's models, where torchvision is missing.
#
# timm imports torchvision, whose wheels fit one build of torch each; beside another build its
# import fails. timm's models use nothing of it: only timm's data sets do, and a check for one
# class of layers. So where torchvision can't be imported, stand-ins take its modules' places
# while timm is imported.

_IMPORTED = ("torchvision", "torchvision.ops", "torchvision.ops.misc", "torchvision.transforms",
             "torchvision.transforms.functional", "torchvision.datasets")  # fmt: skip
"""What timm 1.0 imports of torchvision, other than in a `try`."""


class _FrozenBatchNorm2d(nn.Module):
    """timm asks whether a layer is an instance of it; none of the zoo's is."""


def timm() -> ModuleType:
    """The package.

    Raises:
        ImportError: timm itself isn't installed.
    """
    if "timm" in sys.modules or _importable("torchvision"):
        return importlib.import_module("timm")
    stand_ins = {name: mock.MagicMock() for name in _IMPORTED}
    stand_ins["torchvision.ops.misc"].FrozenBatchNorm2d = _FrozenBatchNorm2d
    sys.modules.update(stand_ins)
    try:
        return importlib.import_module("timm")
    finally:  # others must not take them for torchvision
        for name in _IMPORTED:
            del sys.modules[name]


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError):  # torchvision 0.28 beside another build: its operators lack
        return False
    return True
