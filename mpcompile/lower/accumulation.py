"""Products in the low dtype accumulate in FP32: by default cuBLAS may add parts of a sum in FP16.

The setting belongs to the process, and Dynamo guards on it, so a backend must not change it while a
frame is compiled. It is set when `mpcompile` is first used, before anything is compiled. If a user
changes it back afterwards, the change stands, with a warning.
"""

from __future__ import annotations

import torch

from ..devices.registry import capabilities, supported
from ..errors import warn


def accumulate_in_fp32() -> None:
    """Make the libraries of all device types accumulate products of the low dtypes in FP32."""
    for kind in supported():
        capabilities(kind).accumulate_in_fp32()


def check_accumulation(device: torch.device, low: torch.dtype) -> None:
    """Warn if sums of products in `low` may be accumulated in `low` on `device`."""
    if (setting := capabilities(device).low_accumulation(low)) is not None:
        warn(
            f"{setting} is True: parts of a product's sums may be added in the low dtype. "
            "mpcompile(...) sets it to False; leave it so, or set it to False before the model is "
            "first called"
        )
