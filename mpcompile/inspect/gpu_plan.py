"""The result of planning for an absent GPU: plans, saved bytes, and what remains unknown."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from .. import ir
from ..devices.cuda import AbsentGPU
from ..devices.gpus import GPU
from .plan import Plan
from .saved_bytes import Saved

UNKNOWN = (
    "times: the plan follows from a data sheet, or from a profile that MPCOMPILE_PROFILE names",
    "whether a kernel refuses a dtype or a shape: the GPU is taken to have one for every operator",
    "what the model asks of its device: here it is told that it is on the CPU",
    "what depends on values: a branch on a tensor, sizes from nonzero or unique",
    "which attention kernel is chosen: one that stores no scores is assumed where there is one",
    "what a recurrent kernel keeps for its backward, and cuDNN's and cuBLAS's workspaces",
    "whether the steps fit into memory, and whether the loss goes down",
)
"""What a plan can't know without the GPU."""


@dataclasses.dataclass(frozen=True)
class GPUPlan:
    """What mpcompile would do with a model on one GPU.

    Attributes:
        gpu: its data sheet.
        plans: one for each graph, in the order in which the forward runs them.
        saved: the storages that the forward keeps for the backward.
        left: the reasons why graphs were left in FP32, one sentence for each.
    """

    gpu: GPU
    plans: tuple[Plan, ...]
    saved: tuple[Saved, ...]
    left: tuple[str, ...]

    @property
    def saved_bytes(self) -> int:
        """Bytes kept between forward and backward, without inputs and parameters."""
        return sum(one.bytes for one in self.saved)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        by_dtype: Counter[str] = Counter()
        for one in self.saved:
            by_dtype[ir.SHORT.get(one.dtype, str(one.dtype))] += one.bytes
        return {
            "gpu": dataclasses.asdict(self.gpu),
            "plans": [plan.to_dict() for plan in self.plans],
            "saved_bytes": self.saved_bytes,
            "saved_bytes_by_dtype": dict(by_dtype),
            "saved_bytes_copies_of_inputs": sum(one.bytes for one in self.saved if one.copied),
            "left_in_fp32": list(self.left),
            "unknown": list(UNKNOWN),
        }

    def __str__(self) -> str:
        data = self.to_dict()
        units = AbsentGPU(self.gpu).units()
        parts = [f"{name} {_size(n)}" for name, n in data["saved_bytes_by_dtype"].items()]
        if copied := data["saved_bytes_copies_of_inputs"]:
            parts.append(f"of it copies of weights and other inputs {_size(copied)}")
        saved = _size(self.saved_bytes) + (f" ({', '.join(parts)})" if parts else "")
        lines = [
            f"{self.gpu.name}; Tensor Cores: {units}",
            *map(str, self.plans),
            *(f"a graph stays in FP32: {reason}" for reason in self.left),
            f"Saved for the backward: {saved}",
            "Not known without the GPU:",
            *(f"  {line}" for line in UNKNOWN),
        ]
        return "\n".join(lines)


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
