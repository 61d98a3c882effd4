"""FP32 accumulation is part of the contract: cuBLAS may otherwise add parts of a sum in FP16.

The setting is the process's and one that Dynamo guards on, so a backend must not touch it while a
frame is compiled. It is made when somebody asks for mpcompile, before anything is compiled; who
sets it otherwise afterwards gets what they asked for, and a word.
"""

from __future__ import annotations

import warnings

import torch

from ..devices.registry import capabilities, supported
from ..errors import MPCompileWarning


def accumulate_in_fp32() -> None:
    """Let the libraries of all device types add the terms of low products in FP32 alone."""
    for kind in supported():
        capabilities(kind).accumulate_in_fp32()


def check_accumulation(device: torch.device, low: torch.dtype) -> None:
    """Warn if sums of products in `low` may be added in it on `device`."""
    if (setting := capabilities(device).low_accumulation(low)) is not None:
        warnings.warn(
            f"{setting} is True: parts of a product's sums may be added in the low dtype. "
            "mpcompile(...) sets it to False; leave it so, or set it to False before the model is "
            "first called",
            MPCompileWarning,
            stacklevel=2,
        )
