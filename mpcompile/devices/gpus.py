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
        bf16: whether it multiplies in BF16 as fast as in FP16.
        shared: bytes of shared memory that one block may use.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    memory: int
    bandwidth: float
    fp32: float
    low: float
    bf16: bool
    shared: int


_GIB, _TERA = 2**30, 1e12


def _gpu(
    name: str, capability: tuple[int, int], processors: int, *, gib: int, terabytes: float,
    fp32: float, low: float, shared: int, bf16: bool = True,
) -> GPU:  # fmt: skip
    return GPU(
        name, capability, processors, gib * _GIB, terabytes * _TERA, fp32 * _TERA, low * _TERA,
        bf16, shared,
    )  # fmt: skip


GPUS: dict[str, GPU] = {
    "h200": _gpu(
        "NVIDIA H200", (9, 0), 132, gib=141, terabytes=4.8, fp32=67, low=989, shared=232448
    ),
    "h100": _gpu(
        "NVIDIA H100 80GB HBM3", (9, 0), 132,
        gib=80, terabytes=3.35, fp32=67, low=989, shared=232448,
    ),
    "a100": _gpu(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108,
        gib=80, terabytes=2.039, fp32=19.5, low=312, shared=166912,
    ),
    "rtx4090": _gpu(
        "NVIDIA GeForce RTX 4090", (8, 9), 128,
        gib=24, terabytes=1.008, fp32=82.6, low=165.2, shared=101376,
    ),
    "t4": _gpu(
        "Tesla T4", (7, 5), 40,
        gib=16, terabytes=0.32, fp32=8.1, low=65, shared=65536, bf16=False,
    ),
    "v100": _gpu(
        "Tesla V100-SXM2-16GB", (7, 0), 80,
        gib=16, terabytes=0.9, fp32=15.7, low=125, shared=98304, bf16=False,
    ),
    "p100": _gpu(
        "Tesla P100-SXM2-16GB", (6, 0), 56,
        gib=16, terabytes=0.732, fp32=10.6, low=21.2, shared=49152, bf16=False,
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
