"""The C++ library of `guard.cpp`, which must be loaded before torch."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cuda_parts.build import load

LIBRARY = load(Path(__file__).with_name("guard.cpp"))
