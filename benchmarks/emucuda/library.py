"""The C++ library of `emucuda.cpp`, which must be loaded before torch."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from benchmarks.cuda_parts.build import load

SOURCE = Path(__file__).with_name("emucuda.cpp")
LIBRARY = load(SOURCE)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which Dynamo does
for _name in ("now", "allocated", "peak", "calls"):
    getattr(LIBRARY, f"emucuda_{_name}").restype = ctypes.c_int64
LIBRARY.emucuda_arrive.argtypes = [ctypes.c_int64]
