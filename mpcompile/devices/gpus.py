"""Facts from NVIDIA's data sheets, for plans and tests on machines without these GPUs.

Rates are dense, with FP32 accumulation; memory as advertised. Sources: the data sheets of the H200,
H100 SXM, A100 80GB SXM, V100 SXM2, T4 and P100; for the RTX 4090, the Ada architecture whitepaper.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import MPCompileError, did_you_mean

__all__ = ["GPU", "GPUS", "gpu"]


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
        low: FLOP/s of FP16 products, and of BF16 ones if `bf16`.
        shared: bytes of shared memory that one block may use.
        bf16: whether it multiplies in BF16 as fast as in FP16.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    memory: int
    bandwidth: float
    fp32: float
    low: float
    shared: int
    bf16: bool = True


_GIB = 2**30

GPUS: dict[str, GPU] = {
    "h200": GPU(
        "NVIDIA H200", (9, 0), 132,
        memory=141 * _GIB, bandwidth=4.8e12, fp32=67e12, low=989e12, shared=232448,
    ),
    "h100": GPU(
        "NVIDIA H100 80GB HBM3", (9, 0), 132,
        memory=80 * _GIB, bandwidth=3.35e12, fp32=67e12, low=989e12, shared=232448,
    ),
    "a100": GPU(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108,
        memory=80 * _GIB, bandwidth=2.039e12, fp32=19.5e12, low=312e12, shared=166912,
    ),
    "rtx4090": GPU(
        "NVIDIA GeForce RTX 4090", (8, 9), 128,
        memory=24 * _GIB, bandwidth=1.008e12, fp32=82.6e12, low=165.2e12, shared=101376,
    ),
    "t4": GPU(
        "Tesla T4", (7, 5), 40,
        memory=16 * _GIB, bandwidth=0.32e12, fp32=8.1e12, low=65e12, shared=65536, bf16=False,
    ),
    "v100": GPU(
        "Tesla V100-SXM2-16GB", (7, 0), 80,
        memory=16 * _GIB, bandwidth=0.9e12, fp32=15.7e12, low=125e12, shared=98304, bf16=False,
    ),
    "p100": GPU(
        "Tesla P100-SXM2-16GB", (6, 0), 56,
        memory=16 * _GIB, bandwidth=0.732e12, fp32=10.6e12, low=21.2e12, shared=49152, bf16=False,
    ),
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
