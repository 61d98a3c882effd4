"""What a GPU that is not there tells of itself."""

from __future__ import annotations

from types import SimpleNamespace

from mpcompile.devices.gpus import GPU

__all__ = ["properties_of"]


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
