"""What Inductor and Triton ask of a GPU before they generate code for it, and its data sheet.

Torch internals used here were read in torch 2.13, Triton's in 3.7.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config as inductor

from mpcompile.devices.gpus import GPU, GPUS, gpu

_GIB = 2**30


@dataclass(frozen=True)
class Sheet(GPU):
    """What NVIDIA's data sheets say of a GPU: those of the H200, B200, H100 SXM, A100 80GB SXM,
    L40S, L4, A10G, V100 SXM2, T4 and P100; for the RTX 4090 and 3090, the whitepapers of Ada and
    GA102. Rates are dense, with FP32 accumulation; memory is as advertised.

    Attributes:
        processors: streaming multiprocessors.
        memory: bytes.
        bandwidth: of its memory, bytes/s.
        fp32: FLOP/s of FP32 products outside of Tensor Cores.
        low: FLOP/s of FP16 products, and from Ampere on of BF16 ones.
        shared: bytes of shared memory that one block may use.
    """

    processors: int
    memory: int
    bandwidth: float
    fp32: float
    low: float
    shared: int


_FACTS: dict[str, tuple[int, int, float, float, float, int]] = {
    # processors, memory, bandwidth, fp32, low, shared
    "b200": (148, 180 * _GIB, 8e12, 75e12, 2250e12, 232448),
    "h200": (132, 141 * _GIB, 4.8e12, 67e12, 989e12, 232448),
    "h100": (132, 80 * _GIB, 3.35e12, 67e12, 989e12, 232448),
    "a100": (108, 80 * _GIB, 2.039e12, 19.5e12, 312e12, 166912),
    "rtx4090": (128, 24 * _GIB, 1.008e12, 82.6e12, 165.2e12, 101376),
    "l40s": (142, 48 * _GIB, 0.864e12, 91.6e12, 362e12, 101376),
    "l4": (58, 24 * _GIB, 0.3e12, 30.3e12, 121e12, 101376),
    "a10g": (80, 24 * _GIB, 0.6e12, 35e12, 70e12, 101376),
    "rtx3090": (82, 24 * _GIB, 0.936e12, 35.6e12, 71e12, 101376),
    "t4": (40, 16 * _GIB, 0.32e12, 8.1e12, 65e12, 65536),
    "v100": (80, 16 * _GIB, 0.9e12, 15.7e12, 125e12, 98304),
    "p100": (56, 16 * _GIB, 0.732e12, 10.6e12, 21.2e12, 49152),
}


def sheet(name: str) -> Sheet:
    """The data sheet of a GPU, by a name of `mpcompile.devices.gpus`."""
    known = gpu(name)
    (facts,) = (_FACTS[short] for short, one in GPUS.items() if one is known)
    return Sheet(known.name, known.capability, *facts)


def describe(gpu: Sheet) -> None:
    """Answer what Inductor asks of a GPU, and turn off what would have to run on one."""
    properties = properties_of(gpu)
    major, minor = gpu.capability

    class Worker:
        """What Inductor's compile workers ask."""

        set_device = staticmethod(lambda index: None)
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: properties)

    answers: dict[str, Any] = {
        "Worker": Worker,
        "get_device_properties": staticmethod(lambda device=None: properties),
        "is_available": staticmethod(lambda: True),
        "current_device": staticmethod(lambda: 0),
        "device_count": staticmethod(lambda: 1),
        "get_compute_capability": staticmethod(lambda device=None: 10 * major + minor),
        "is_triton_capable": staticmethod(lambda device=None: True),
        "raise_if_triton_unavailable": staticmethod(lambda device=None: None),
        "get_raw_stream": staticmethod(lambda index: 0),
        "synchronize": staticmethod(lambda device=None: None),
    }
    for name, answer in answers.items():
        setattr(CudaInterface, name, answer)
    torch.cuda._exchange_device = lambda index: 0  # type: ignore[attr-defined]
    torch.cuda._maybe_exchange_device = lambda index: 0  # type: ignore[attr-defined]
    set_for_all_threads(inductor, "compile_threads", 1)  # workers know nothing of this device
    set_for_all_threads(inductor, "shape_padding", False)  # times products padded and unpadded


def set_for_all_threads(config: Any, name: str, value: Any) -> None:
    """Set an option of torch's. What is assigned to one holds in the thread that does it, and the
    backward is compiled in a thread of autograd's.
    """
    config._config[name].default = value


def triton_driver(gpu: Sheet) -> Any:
    """Triton's CUDA driver, as far as it is asked before a kernel is loaded."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    major, minor = gpu.capability
    properties = {
        "max_shared_mem": gpu.shared,
        "multiprocessor_count": gpu.processors,
        "max_num_regs": 65536,
        "warpSize": 32,
    }

    class ByName(CudaDriver):  # type: ignore[misc]
        """Of a GPU that can't be loaded to."""

        utils = SimpleNamespace(get_device_properties=lambda index: properties)

        def __init__(self) -> None:
            pass

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 10 * major + minor, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

    CudaDriver.is_active = staticmethod(lambda: True)
    return ByName()


# -- properties ------------------------------------------------------------------------------------
# What a GPU that is not there tells of itself.


def properties_of(gpu: Sheet) -> SimpleNamespace:
    """What `torch.cuda.get_device_properties` tells."""
    major, minor = gpu.capability
    return SimpleNamespace(
        name=gpu.name, major=major, minor=minor, total_memory=gpu.memory,
        multi_processor_count=gpu.processors, warp_size=32, max_threads_per_block=1024,
        max_threads_per_multi_processor=1024 if minor == 5 else 2048,
        regs_per_multiprocessor=65536, shared_memory_per_block=49152,
        shared_memory_per_block_optin=gpu.shared,
        shared_memory_per_multiprocessor=gpu.shared + 1024, L2_cache_size=50 * 2**20,
        is_integrated=False, gcnArchName=gpu.name, uuid="by name only",
        clock_rate=1_980_000, memory_clock_rate=2_619_000, memory_bus_width=5120,
    )  # fmt: skip
