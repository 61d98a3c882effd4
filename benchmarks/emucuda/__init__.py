"""A CUDA device that computes, for tests on machines without a GPU: on the host, in a CPU build.

    python -m benchmarks.emucuda h100 -m pytest -m gpu tests/devices/test_gpu.py

runs Python where torch finds an H100. Or, in a program:

    from benchmarks import emucuda           # before torch: loads a C++ library
    device = emucuda.become("h100")
    torch.randn(4, device="cuda").sum()      # has a value

What is the GPU's way, and not the host's, is done its way: new memory is NaN, and addresses are
used again; products of FP16 are summed in FP32; what waits for the device raises where that was
asked for; a copy to pinned memory arrives when its event has happened and not before; what a CUDA
graph returned is gone in the next step. With Triton installed, Inductor generates the GPU's
kernels, and Triton's interpreter runs them and looks at each address.

Design note 17 says how, and what it cannot show.

A process that has become a GPU stays one: use one for each.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from benchmarks.cuda_parts.build import CannotBuild, load

LIBRARY = load(Path(__file__).with_name("emucuda.cpp"))  # before torch, which the last line imports
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which Dynamo does
for _name in ("now", "allocated", "peak", "calls"):
    getattr(LIBRARY, f"emucuda_{_name}").restype = ctypes.c_int64
LIBRARY.emucuda_arrive.argtypes = [ctypes.c_int64]

from benchmarks.emucuda.device import EmulatedGPU, become  # noqa: E402

__all__ = ["LIBRARY", "CannotBuild", "EmulatedGPU", "become"]
