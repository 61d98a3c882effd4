"""The networks that the benchmarks train, from plain torch.nn: all but DCGAN's return their loss.

Sizes and layer order are the originals'. A model is called with an input and its targets, both of
which `Sample` makes. Shapes in the docstrings: B examples, T tokens, D width, C channels.
"""

from __future__ import annotations

from benchmarks.models.images import (
    Detector,
    Discriminator,
    Generator,
    Recommender,
    ResNet,
    UNet,
    drawn_as_dcgan,
    resnet18,
    resnet50,
)
from benchmarks.models.sample import Sample, pixels, tokens
from benchmarks.models.sequences import GPT2, MLP, Attention, BERTEncoder, Tagger, ViT
