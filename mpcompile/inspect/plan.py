"""The plan of a whole model: its graphs, and what holds for all of them, as plain data."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import ir
from ..devices.cuda import AbsentGPU
from ..devices.gpus import GPU
from .graph_plan import GraphPlan, PlanNode
from .page import write
from .saved_bytes import Saved
from .tensor_cores import TensorCoreReport

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


@dataclass(frozen=True)
class ModuleLine:
    """One module of the model: its dotted path ("" for the model itself), and its class."""

    path: str
    kind: str


@dataclass(frozen=True)
class Plan:
    """What mpcompile does with a model.

    Attributes:
        model: the name of its class.
        level, dtype, device: "O1", "float16", "cpu".
        graphs: one for each graph, in the order in which the forward runs them.
        modules: the modules of the model, in the order of `named_modules()`.
        versions: "mpcompile" and "torch" -> version.
        gpu: the data sheet of the GPU that it was planned for; None: this machine's own device.
        repairs: what `repair=True` has pinned to FP32 while the model trained, one sentence each.
    """

    model: str
    level: str
    dtype: str
    device: str
    graphs: tuple[GraphPlan, ...]
    modules: tuple[ModuleLine, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    gpu: GPU | None = None
    repairs: tuple[str, ...] = ()

    @property
    def nodes(self) -> tuple[PlanNode, ...]:
        """The nodes of all graphs."""
        return tuple(node for graph in self.graphs for node in graph.nodes)

    @property
    def left(self) -> tuple[str, ...]:
        """The reasons why graphs were left in FP32, one sentence for each."""
        return tuple(graph.left for graph in self.graphs if graph.left is not None)

    @property
    def breaks(self) -> tuple[str, ...]:
        """The reasons why the program broke into several graphs, one for each break."""
        return tuple(graph.ends_with for graph in self.graphs if graph.ends_with is not None)

    @property
    def casts(self) -> int:
        """Number of casts in all graphs."""
        return sum(graph.casts for graph in self.graphs)

    @property
    def tensor_cores(self) -> TensorCoreReport:
        """The products of all graphs."""
        reports = [graph.tensor_cores for graph in self.graphs]
        return TensorCoreReport(
            tuple(op for report in reports for op in report.ops),
            tuple(line for report in reports for line in report.advice),
        )

    @property
    def saved(self) -> tuple[Saved, ...]:
        """What the forward keeps for the backward."""
        return tuple(one for graph in self.graphs for one in graph.saved)

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
            "model": self.model,
            "level": self.level,
            "dtype": self.dtype,
            "device": self.device,
            "versions": dict(self.versions),
            "gpu": None if self.gpu is None else dataclasses.asdict(self.gpu),
            "modules": [dataclasses.asdict(module) for module in self.modules],
            "graphs": [graph.to_dict() for graph in self.graphs],
            "casts": self.casts,
            "tensor_core_share": self.tensor_cores.share,
            "saved_bytes": self.saved_bytes,
            "saved_bytes_by_dtype": dict(by_dtype),
            "saved_bytes_copies_of_inputs": sum(one.bytes for one in self.saved if one.copied),
            "left_in_fp32": list(self.left),
            "graph_breaks": list(self.breaks),
            "repairs": list(self.repairs),
            "unknown": list(UNKNOWN) if self.gpu is not None else [],
        }

    def to_html(self, path: str | Path) -> None:
        """Write the plan as one HTML file to read in a browser; it needs no network.

        Raises:
            MPCompileError: the file can't be written.
        """
        write(self, path)

    def __str__(self) -> str:
        data = self.to_dict()
        where = self.device
        if self.gpu is not None:
            where = f"{self.gpu.name}; Tensor Cores: {AbsentGPU(self.gpu).units()}"
        parts = [f"{name} {_size(n)}" for name, n in data["saved_bytes_by_dtype"].items()]
        if copied := data["saved_bytes_copies_of_inputs"]:
            parts.append(f"of it copies of weights and other inputs {_size(copied)}")
        saved = _size(self.saved_bytes) + (f" ({', '.join(parts)})" if parts else "")
        lines = [
            where,
            *(str(graph) for graph in self.graphs if graph.left is None),
            *(f"a graph stays in FP32: {reason}" for reason in self.left),
            *(f"graph break: {reason}" for reason in self.breaks),
            *(f"repaired: {event}" for event in self.repairs),
            f"Saved for the backward: {saved}",
        ]
        if self.gpu is not None:
            lines += ["Not known without the GPU:", *(f"  {line}" for line in UNKNOWN)]
        return "\n".join(lines)


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
