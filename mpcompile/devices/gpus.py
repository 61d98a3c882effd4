"""Facts from NVIDIA's data sheets, for plans and tests on machines without these GPUs.

Rates are dense, with FP32 accumulation; memory as advertised. Sources: the data sheets of the H200,
B200, H100 SXM, A100 80GB SXM, L40S, L4, A10G, V100 SXM2, T4 and P100; for the RTX 4090 and 3090,
the whitepapers of Ada and GA102.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import MPCompileError, did_you_mean


@dataclass(frozen=True)
class GPU:
    """The facts of one GPU.

    Attributes:
        name: what torch.cuda.get_device_name() returns for it.
        capability: compute capability, (major, minor).
        processors: streaming multiprocessors.
        memory: bytes.
        bandwidth: of its memory, bytes/s.
        fp32: FLOP/s of FP32 products outside of Tensor Cores.
        low: FLOP/s of FP16 products, and from Ampere on of BF16 ones.
        shared: bytes of shared memory that one block may use.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    memory: int
    bandwidth: float
    fp32: float
    low: float
    shared: int


_GIB = 2**30

GPUS: dict[str, GPU] = {
    # name, capability, processors, memory, bandwidth, fp32, low, shared
    "b200": GPU("NVIDIA B200", (10, 0), 148, 180 * _GIB, 8e12, 75e12, 2250e12, 232448),
    "h200": GPU("NVIDIA H200", (9, 0), 132, 141 * _GIB, 4.8e12, 67e12, 989e12, 232448),
    "h100": GPU("NVIDIA H100 80GB HBM3", (9, 0), 132, 80 * _GIB, 3.35e12, 67e12, 989e12, 232448),
    "a100": GPU("NVIDIA A100-SXM4-80GB", (8, 0), 108, 80 * _GIB, 2.039e12, 19.5e12, 312e12, 166912),
    "rtx4090": GPU("NVIDIA GeForce RTX 4090", (8, 9), 128, 24 * _GIB, 1.008e12, 82.6e12,
                165.2e12, 101376),
    "l40s": GPU("NVIDIA L40S", (8, 9), 142, 48 * _GIB, 0.864e12, 91.6e12, 362e12, 101376),
    "l4": GPU("NVIDIA L4", (8, 9), 58, 24 * _GIB, 0.3e12, 30.3e12, 121e12, 101376),
    "a10g": GPU("NVIDIA A10G", (8, 6), 80, 24 * _GIB, 0.6e12, 35e12, 70e12, 101376),
    "rtx3090": GPU("NVIDIA GeForce RTX 3090", (8, 6), 82, 24 * _GIB, 0.936e12, 35.6e12, 71e12,
                101376),
    "t4": GPU("Tesla T4", (7, 5), 40, 16 * _GIB, 0.32e12, 8.1e12, 65e12, 65536),
    "v100": GPU("Tesla V100-SXM2-16GB", (7, 0), 80, 16 * _GIB, 0.9e12, 15.7e12, 125e12, 98304),
    "p100": GPU("Tesla P100-SXM2-16GB", (6, 0), 56, 16 * _GIB, 0.732e12, 10.6e12, 21.2e12, 49152),
}  # fmt: skip
"""The GPUs known by name."""


def gpu(name: str) -> GPU:
    """The GPU with a short name such as `"h100"`.

    Raises:
        MPCompileError: the name is unknown.
    """
    key = str(name).lower().replace(" ", "").replace("-", "")
    if key not in GPUS:
        hint = did_you_mean(key, GPUS)
        if key.partition(":")[0] in ("cpu", "cuda"):
            hint = ": where none is named, the plan is for the device that the model is on"
        raise MPCompileError(f"unknown GPU {name!r}{hint}; known: {', '.join(GPUS)}")
    return GPUS[key]
