"""Compile the kernels that Inductor generates for the GPU that exists by name, with no GPU.

    lane = compile_kernels(device)       # needs Triton; for the rest of the process
    with device:
        ...                              # training with emit="inductor"
    lane.kernels                         # each with its registers and stack
    lane.launches                        # names, in order; `lane.launches.clear()` before a step

Triton's own compiler and NVIDIA's assembler, which come with Triton's wheel, make the machine code
for the GPU's compute capability. Inductor's wrappers run on fakes: buffers and library calls by
their metadata, kernels not at all.

Torch internals used here were read in torch 2.13, Triton's in 3.7.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config as inductor

from benchmarks.cuda_parts.inductor import set_for_all_threads, triton_driver
from benchmarks.fakecuda.device import FakeGPU, let_inductor_in


@dataclass(frozen=True)
class Kernel:
    """One kernel as compiled.

    Attributes:
        name: Inductor's.
        target: what the machine code is for, as `"sm_90a"`.
        config: block sizes, warps and stages. Of several, a GPU would time which is fastest.
        resources: what it takes.
    """

    name: str
    target: str
    config: str
    resources: Resources


@dataclass
class Lane:
    """What was compiled, and what was launched since."""

    kernels: list[Kernel] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)


def compile_kernels(device: FakeGPU) -> Lane:
    """Let Inductor generate kernels for the device and compile them.

    Raises:
        ImportError: Triton is not installed.
    """
    import triton
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    let_inductor_in(device)
    triton.runtime.driver.set_active(triton_driver(device.gpu))
    _run_wrappers_on_fakes()
    set_for_all_threads(inductor, "use_static_cuda_launcher", False)  # it drops the machine code
    lane = Lane()

    def keep(tuner: CachingAutotuner) -> None:
        """In place of loading the machine code."""
        name = tuner.fn.__name__
        for made in tuner.compile_results:
            text = made.kernel.asm["ptx"]
            target = next(x.split()[1] for x in text.splitlines() if x.startswith(".target"))
            used = resources(made.kernel.asm["cubin"])
            lane.kernels.append(Kernel(name, target.rstrip(","), str(made.config), used))

    def launch(tuner: CachingAutotuner, *args: Any, **kwargs: Any) -> None:
        lane.launches.append(tuner.fn.__name__)

    CachingAutotuner._make_launchers = keep  # type: ignore[method-assign]
    CachingAutotuner.run = launch  # type: ignore[method-assign]
    return lane


def _run_wrappers_on_fakes() -> None:
    guards: Any = torch._C._dynamo.guards  # type: ignore[attr-defined]
    guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda:0"
    )
    guards._reinterpret_tensor = lambda tensor, size, stride, offset=0: torch.as_strided(
        tensor, size, stride, tensor.storage_offset() + offset
    )


# -- resources -------------------------------------------------------------------------------------
# What a compiled kernel takes of a multiprocessor, read from its cubin.
#
# With `cuobjdump` as it lies in Triton's wheel (read in Triton 3.7).


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
