"""Convolutional networks in BF16: ResNet-18 and a U-Net against torch.compile.

On a CPU a convolution's backward may be slower in BF16 than in FP32, so a rule that lowers every
convolution can lose. Images and models are in the order that a user gives without a thought for it,
NCHW; whoever wants another has to change to it within the step.
"""

from __future__ import annotations

import functools

from benchmarks.harness.report import Report, Settings
from benchmarks.models import Sample, UNet, resnet18
from benchmarks.step_times import Timed, Work, compare

CPU = Work(
    models=(
        Timed("ResNet-18, B8, 112 px", resnet18, Sample((8, 3, 112, 112), (8,), 1000), steps=2),
        Timed("U-Net, B2, 128 px", UNet, Sample((2, 3, 128, 128), (2, 128, 128), 4), steps=2),
    )
)
CUDA = Work(
    models=(
        Timed("ResNet-18, B256, 224 px", resnet18, Sample((256, 3, 224, 224), (256,), 1000),
              steps=8),
        Timed("U-Net, B32, 256 px", UNet, Sample((32, 3, 256, 256), (32, 256, 256), 4), steps=8),
    )
)  # fmt: skip

TINY = Work(
    models=(
        Timed("ResNet-18", functools.partial(resnet18, width=8, depth=1),
              Sample((2, 3, 32, 32), (2,), 1000), steps=1),
        Timed("U-Net", functools.partial(UNet, width=8, levels=2),
              Sample((1, 3, 8, 8), (1, 8, 8), 4), steps=1),
    ),
    rounds=1,
    emit="eager",
)  # fmt: skip


def run(settings: Settings) -> Report:
    """Time both networks; under `settings.quick` narrow ones, once, without compiling."""
    full = CUDA if settings.device.type == "cuda" else CPU
    note = (
        "ResNet-18 is the original, on a CPU at a smaller image; the U-Net has four levels, 32 "
        "channels at the first, batch norm and padding. Both in NCHW."
    )
    work = TINY if settings.quick else full
    return compare("conv", "Convolutional networks in BF16", [note], work, settings.device)
