"""Run Python where torch finds a GPU that is emulated.

    python -m benchmarks.emucuda h100 script.py
    python -m benchmarks.emucuda t4 -m pytest -m gpu tests/devices/test_gpu.py

The first argument is a GPU's name, of `mpcompile.devices.gpus`; the rest goes to Python. Python
programs that it starts find the GPU, too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.cuda_parts.build import library
from benchmarks.harness.processes import ROOT


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    name, *rest = sys.argv[1:]
    library(Path(__file__).with_name("emucuda.cpp"))  # says here what is missing to build it
    os.environ["EMUCUDA"] = name
    paths = [str(Path(__file__).with_name("at_start")), str(ROOT)]
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.execv(sys.executable, [sys.executable, *rest])


if __name__ == "__main__":
    main()
