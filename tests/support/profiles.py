"""Device profiles for tests: the dtypes, a device, and a profile of samples."""

from __future__ import annotations

import torch

from mpcompile.profile import Profile, Sample
from mpcompile.profile.model import DTYPES

FP32, BF16, FP16 = DTYPES
CPU = torch.device("cpu")


def profile_of(*samples: Sample) -> Profile:
    return Profile("a CPU", "cpu", "2.13.0", "", 2, samples)
