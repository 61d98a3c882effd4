"""`mpcompile info` on a GPU that exists by name only: `python -m benchmarks.gpu.by_name h100`."""

from __future__ import annotations

from benchmarks import fakecuda  # isort: skip  (before torch)

import sys

from mpcompile import cli

if __name__ == "__main__":
    fakecuda.become(sys.argv[1])
    sys.exit(cli.main(["info"]))
