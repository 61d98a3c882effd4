"""What a compiled kernel takes of a multiprocessor, read from its cubin.

With `cuobjdump` as it lies in Triton's wheel (read in Triton 3.7).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Resources", "resources"]


@dataclass(frozen=True)
class Resources:
    """Of one kernel.

    Attributes:
        registers: 32-bit registers of each thread.
        stack: bytes of local memory in each thread's stack frame; where registers do not suffice,
            they are spilled there.
        shared: bytes of shared memory of each block that are fixed when compiling; what is asked
            for at the launch comes on top.
        local: bytes of local memory of each thread beside the stack.
    """

    registers: int
    stack: int
    shared: int
    local: int


def resources(cubin: bytes) -> Resources:
    """Of the one kernel in a cubin.

    Raises:
        RuntimeError: cuobjdump says something else than it used to.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=False
        )
    found = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", run.stdout + run.stderr)
    if len(found) != 1:
        raise RuntimeError(f"cuobjdump: {(run.stdout + run.stderr)[-500:]!r}")
    return Resources(*map(int, found[0]))
