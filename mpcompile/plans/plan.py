"""The plan of a whole model: its graphs, and what holds for all of them, as plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group

from ..devices.gpus import GPU
from ..errors import MPCompileError
from . import plan_text, stored
from .diff import PlanDiff, difference
from .graph_plan import GraphPlan, PlanNode
from .grid import as_rich, as_text
from .page import app, of_plan
from .saved_bytes import Saved
from .tensor_cores import TensorCoreReport
from .why import Answer, answer

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
class OutsideLine:
    """Products of one module that run outside of the graphs, in FP32: its dotted path, and the
    FLOPs of one forward.
    """

    path: str
    flops: int


ENOUGH = 0.99
"""The share of the product FLOPs in graphs from which on what runs outside doesn't matter."""


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
        outside: what runs outside of the graphs, in FP32; the largest first.
        share_in_graphs: the share of the product FLOPs, 0 to 1, that runs in graphs.
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
    outside: tuple[OutsideLine, ...] = ()
    share_in_graphs: float = 1.0

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

    @property
    def unknown(self) -> tuple[str, ...]:
        """What the plan can't know because its GPU is not there."""
        return () if self.gpu is None else UNKNOWN

    def why(self, name: str) -> Answer:
        """Why a node is what it is, or what was decided for a module: text to print.

        Args:
            name: a node, as the plan shows it (it may stand in several graphs: each is shown); or
                a module's dotted path, or the end of one: `"blocks.0.attn"`, `"attn"`.

        Raises:
            MPCompileError: nothing has that name.
        """
        modules = [module.path for module in self.modules]
        return answer(dict(enumerate(self.graphs)), name, modules)

    def diff(self, other: Plan) -> PlanDiff:
        """What differs from another plan: of another level, policy, device or version.

        The result prints as tables, and is false if nothing differs.

        Raises:
            MPCompileError: `other` is no Plan.
        """
        return difference(self, other)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it back."""
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
            "saved_bytes_by_dtype": plan_text.bytes_by_dtype(self),
            "saved_bytes_copies_of_inputs": sum(one.bytes for one in self.saved if one.copied),
            "left_in_fp32": list(self.left),
            "graph_breaks": list(self.breaks),
            "repairs": list(self.repairs),
            "outside": [dataclasses.asdict(line) for line in self.outside],
            "share_in_graphs": self.share_in_graphs,
            "unknown": list(self.unknown),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """The plan that `to_dict()` turned into `data`, here or on another machine.

        Keys that this version doesn't know are ignored.

        Raises:
            MPCompileError: it is not the data of a plan, or something is missing.
        """
        if isinstance(data, dict) and "nodes" in data and "graphs" not in data:
            raise MPCompileError("this is the plan of one graph: GraphPlan.from_dict() reads it")
        try:
            return stored.restored(cls, data)
        except MPCompileError as error:
            raise MPCompileError(f"{error}{stored.written_by(data)}") from None

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON.

        Raises:
            MPCompileError: the file can't be written.
        """
        stored.write(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save()` wrote.

        Raises:
            MPCompileError: the file can't be read, or holds no plan.
        """
        data = stored.read(path)
        try:
            return cls.from_dict(data)
        except MPCompileError as error:
            raise MPCompileError(f"{path}: {error}") from None

    def to_html(self, path: str | Path) -> None:
        """Write the plan as one HTML file to read in a browser; it needs no network.

        Raises:
            MPCompileError: the file can't be written.
        """
        app.write(of_plan.render(self), path, "plan")

    def __str__(self) -> str:
        return as_text(plan_text.parts(self))

    def __rich__(self) -> Group:
        return as_rich(plan_text.parts(self))
