"""The data of a whole model's plan: its graphs, and what holds for all of them. It can't show
itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..devices.gpus import GPU
from .graph_plan import GraphPlan, PlanNode
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
class OutsideLine:
    """Products of one module that run outside of the graphs, in FP32: its dotted path, and the
    FLOPs of one forward.
    """

    path: str
    flops: int


ENOUGH = 0.99
"""The share of the product FLOPs in graphs from which on what runs outside doesn't matter."""


@dataclass(frozen=True)
class PlanData:
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
