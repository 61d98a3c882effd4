"""What can be seen on a GPU that exists by name only.

    python -m benchmarks.gpu.by_name h100 info
    python -m benchmarks.gpu.by_name h100 smoke

The first is `mpcompile info` there; the second compiles, op by op, and has no numbers to compare.
"""

from __future__ import annotations

from benchmarks import fakecuda  # isort: skip  (before torch)

import sys

from benchmarks.gpu import smoke
from mpcompile import cli

if __name__ == "__main__":
    _, name, what = sys.argv
    device = fakecuda.become(name)
    if what == "info":
        sys.exit(cli.main(["info"]))
    with device:
        sys.exit(smoke.run("cuda", emit="aot_eager", numbers=False))
