"""Device profiles for tests: the dtypes, a device, and a profile of samples."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from mpcompile.profile import Profile, Sample
from mpcompile.profile.cost_model import CEILINGS, DTYPES, KINDS

FP32, BF16, FP16 = DTYPES
CPU = torch.device("cpu")


def profile_of(*samples: Sample) -> Profile:
    return Profile("a CPU", "cpu", "2.13.0", "", 2, samples)


_TINY = {"gemm": (1, 1, 1, 1), "conv": (1, 1, 1, 1, 1, 1), "attention": (1, 1, 1, 1),
         "rnn": (1, 1, 1, 1, 1), "copy": (1,)}  # fmt: skip
_HUGE = {"gemm": (1, 16384, 16384, 16384), "conv": (256, 1024, 1024, 9, 4096, 1),
         "attention": (1024, 8192, 8192, 128), "rnn": (4096, 1024, 4096, 4096, 4),
         "copy": (2**34,)}  # fmt: skip


def from_ceilings(
    empty: Profile, *, bandwidth: float, rates: Mapping[torch.dtype, float], launch: float
) -> Profile:
    """A profile computed from a data sheet, as `mpcompile/profile/builtin/cuda-hopper.json` is.

    It has two samples for each kind and dtype, a tiny call that costs only its launch and a huge
    one that runs at the ceiling, which put every size on the roofline.

    Args:
        empty: what it is for, without samples.
        bandwidth: of memory, bytes/s.
        rates: dtype -> FLOP/s of matrix products; also taken for the other kinds.
        launch: seconds of one empty kernel.
    """
    samples = []
    for name, kind in KINDS.items():
        for dtype, rate in rates.items():
            tiny, huge = _TINY[name], _HUGE[name]
            calls = 1 if name == "copy" else 2  # a backward has a kernel for each operand
            samples.append(Sample(name, dtype, tiny, launch, launch * (1 + calls)))
            seconds = kind.flops(*huge) / rate if name != "copy" else huge[0] / bandwidth
            factor = kind.flops_of_both if name != "copy" else kind.elements_of_both
            samples.append(Sample(name, dtype, huge, seconds, seconds * factor))
    return replace(empty, samples=tuple(samples), origin=CEILINGS)
