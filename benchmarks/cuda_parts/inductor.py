"""What Inductor and Triton ask of a GPU before they generate code for it.

Torch internals used here were read in torch 2.13, Triton's in 3.7.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config as inductor

from mpcompile.devices.gpus import GPU


def describe(gpu: GPU) -> None:
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


def triton_driver(gpu: GPU) -> Any:
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


def properties_of(gpu: GPU) -> SimpleNamespace:
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
