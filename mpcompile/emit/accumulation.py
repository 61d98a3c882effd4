"""FP32 accumulation is part of the contract: cuBLAS may otherwise add parts of a sum in FP16.

The setting is the process's and one that Dynamo guards on, so a backend must not touch it while a
frame is compiled. It is made when somebody asks for mpcompile, before anything is compiled; who
sets it otherwise afterwards gets what they asked for, and a word.
"""

from __future__ import annotations

import warnings

import torch

from ..errors import MPCompileWarning

_SETTINGS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


def accumulate_in_fp32() -> None:
    """Let cuBLAS add in FP32 alone; nothing to do for a torch without CUDA."""
    if torch.backends.cuda.is_built():
        for name in _SETTINGS:
            setattr(torch.backends.cuda.matmul, name, False)


def check_accumulation(low: torch.dtype) -> None:
    """Warn if sums of products in `low` may be added in it on a CUDA device."""
    name = _SETTINGS[low is torch.bfloat16]
    if getattr(torch.backends.cuda.matmul, name):
        warnings.warn(
            f"torch.backends.cuda.matmul.{name} is True: cuBLAS may add parts of a product's sums "
            "in the low dtype. mpcompile(...) sets it to False; leave it so, or set it to False "
            "before the model is first called",
            MPCompileWarning,
            stacklevel=2,
        )
