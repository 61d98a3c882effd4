"""Every architecture of the zoo, by library and name."""

from __future__ import annotations

from .beyond_text import AUDIO, EXPERTS, STATE_SPACES, VISIONS
from .making import Entry
from .text import DECODERS, ENCODER_DECODERS, ENCODERS
from .timm_models import CONVOLUTIONS, MIXERS, TRANSFORMERS
from .torchvision_models import CLASSIFIERS, DETECTORS, FLOWS, SEGMENTERS, VIDEOS

__all__ = ["HUGGING_FACE", "LIBRARIES", "TIMM", "TORCHVISION"]

HUGGING_FACE: dict[str, Entry] = {
    **ENCODERS, **DECODERS, **ENCODER_DECODERS, **VISIONS, **AUDIO, **EXPERTS, **STATE_SPACES
}  # fmt: skip
TIMM: dict[str, Entry] = {**CONVOLUTIONS, **TRANSFORMERS, **MIXERS}
TORCHVISION: dict[str, Entry] = {**DETECTORS, **SEGMENTERS, **CLASSIFIERS, **FLOWS, **VIDEOS}

LIBRARIES = {"transformers": HUGGING_FACE, "timm": TIMM, "torchvision": TORCHVISION}
