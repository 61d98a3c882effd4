"""NVIDIA's GPUs by name, for plans on machines without them: what decides a plan. (The rates and
sizes of their data sheets are in `benchmarks/cuda_parts/inductor.py`: no plan depends on them.)
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
    """

    name: str
    capability: tuple[int, int]


GPUS: dict[str, GPU] = {
    "b200": GPU("NVIDIA B200", (10, 0)),
    "h200": GPU("NVIDIA H200", (9, 0)),
    "h100": GPU("NVIDIA H100 80GB HBM3", (9, 0)),
    "a100": GPU("NVIDIA A100-SXM4-80GB", (8, 0)),
    "rtx4090": GPU("NVIDIA GeForce RTX 4090", (8, 9)),
    "l40s": GPU("NVIDIA L40S", (8, 9)),
    "l4": GPU("NVIDIA L4", (8, 9)),
    "a10g": GPU("NVIDIA A10G", (8, 6)),
    "rtx3090": GPU("NVIDIA GeForce RTX 3090", (8, 6)),
    "t4": GPU("Tesla T4", (7, 5)),
    "v100": GPU("Tesla V100-SXM2-16GB", (7, 0)),
    "p100": GPU("Tesla P100-SXM2-16GB", (6, 0)),
}
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
