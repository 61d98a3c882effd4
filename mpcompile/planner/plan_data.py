"""The data of a plan: of one graph, every node, its precision and the reason; of a whole model, its
graphs and what holds for all of them. `graph_plan.py` and `model_plan.py` show it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import ir
from ..devices.gpus import GPU
from ..rules.table import TABLE
from ..verify.verdicts import Verify
from .min_cut import OF_RESULT, MinimumCut, Weighed
from .partitioned import BackwardNode, Saved
from .tensor_core_report import TensorCoreReport

_ADDED = {role.value for role in ir.ADDED}


@dataclass(frozen=True)
class Line:
    """One line of a graph: the node's `name`, its `text` as in a dump, and the nodes it `reads`."""

    name: str
    text: str
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanNode:
    """One line of the plan.

    Attributes:
        name: as in the dump; `Policy(nodes=...)` takes it.
        op: operator, `"aten::linear"`.
        module: dotted path of the module it comes from, or "".
        source: `"model.py:12"`, or "".
        captured, planned: result types in the FP32 program and as planned, `"f32[8, 4]"`.
        precision: "LOW", "FULL" or "KEEP".
        low: what "LOW" is of it, "bfloat16", where this isn't the graph's dtype (a policy or an
            autocast region names it); else "".
        rule, reason: who decided, and why.
        products: number of matrix products inside an opaque call; they stay FP32.
        frames: the user's lines that led here, outermost first: `"train.py:30 in forward"`.
        reads: the names of its operands in the rewritten graph, inputs and casts included.
    """

    name: str
    op: str
    module: str
    source: str
    captured: str
    planned: str
    precision: str
    rule: str
    reason: str
    products: int = 0
    frames: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    low: str = ""

    @property
    def is_added(self) -> bool:
        """Whether a pass put the node there: a cast, a pad, or what scales a gradient."""
        return self.rule in _ADDED

    @property
    def change(self) -> str:
        """What it would take to change its precision, in one sentence."""
        if self.rule == "rewrite":
            return (
                f"a pass put it in the place of nodes of your program: disable_passes="
                f"[{_rewriter(self)!r}] brings them back, and a policy can then name them"
            )
        own = self.rule in ("policy", "captured", "update")
        if self.op == "getitem" and self.reads and not own:
            part = f"it is a part of the result of {self.reads[0]}"
            return f"{part}: what changes that changes it, too"
        names = not self.reads or (self.op in TABLE and TABLE[self.op].converts)
        named = names and self.rule == "table" and self.precision == "KEEP"
        sentence = "this version of mpcompile can't tell ({why})"
        sentence = _SENTENCES.get("named" if named else self.rule, sentence)
        word, operators = ("fp32", "full") if self.precision == "LOW" else ("low", "low")
        return sentence.format(
            pin=f'Policy(nodes={{"{self.name}": "{word}"}})',
            ops=f'Policy({operators}=["{self.op.removeprefix("aten::")}"])',
            why=self.reason,
        )


# What it would take to change a node's precision: that follows from who decided (`ir.By`,
# `ir.Role`). A policy overrules the table, the planner, the guards and autocast regions; it can't
# change what `classify` keeps as captured, nor what passes add.
# By the word of `Mark.rule`, or "named": the program names the dtype.
# {pin}: the policy that changes this node; {ops}: the one for all nodes of its operator; {why}: the
# reason of the decision.
_SENTENCES = {
    "table": "{pin} changes this node, {ops} all of its operator",
    "named": "its dtype stands in your program: change it there ({why})",
    "plan": "the planner chose by cost: {pin} decides instead, {ops} for all nodes of its operator",
    "region": "{pin} overrules the autocast region that your program put around it; or take the "
    "operator out of that region",
    "guard": "{pin} overrules the guard, and what it prevents may then happen: overflow, zeros or "
    "a large error ({why})",
    "alias": "return a .clone(), so that nothing shares memory; {pin} overrules the rule, but if "
    "results then no longer share memory, the whole graph stays in FP32",
    "kernel": "no policy helps, since the device can't run it ({why}): it takes another low dtype, "
    "a newer torch, or another device",
    "policy": "your own policy decided ({why}): remove the entry, or give it another precision",
    "captured": "no policy changes it ({why}): it keeps the dtypes of your program, and only a "
    "change of the program changes them",
    "update": "no policy changes it ({why}): it keeps the dtypes of your program",
    "cast": "it follows from its two ends ({why}): change the precision of the node that it reads, "
    "or of the one that reads it",
    "scale": "it belongs to the loss scale: loss_scale='none' leaves it out, and in FP16 small "
    "gradients may then become zero",
    "pad": "pad='never' leaves it out, and so does a size in the model that needs no padding",
    "copy": "no policy changes it ({why}): return a .contiguous() result from the model",
    "kept": "it goes if nothing is compared with the value, or with what is made of it ({why})",
    "finite": "in BF16 nothing overflows, and it is left out",
    "layout": "it goes if the node that it reads runs in FP32, whose kernel lays its result out as "
    "your program was traced with",
    "step": "no policy changes it: it is part of an optimizer's step",
}


def _rewriter(node: PlanNode) -> str:
    """The pass that made a node of the rule "rewrite"."""
    if node.op == "mpcompile::softmax_low":
        return "narrow_softmax"
    fused = node.op == "mpcompile::linear_cross_entropy" or "_rows" in node.name
    return "fuse_head" if fused else "expand_attention"


@dataclass(frozen=True)
class GraphData:
    """What the passes decided for one captured graph, or why it was left in FP32.

    Attributes:
        level, dtype, device: "O1", "float16", "cpu"; "O0", "float32" for a graph left in FP32.
        nodes: one for each node, in program order, casts and scaling included.
        casts: number of casts in the final graph.
        scaled: whether gradients are scaled inside the graph.
        seconds: wall time of capture and of each pass.
        changed: names of the passes that changed the graph, in their order.
        tensor_cores: the dims of every matrix product, and which may run on Tensor Cores.
        dump_dir: the directory of the dump, or None.
        left: why the graph was left in FP32, in one sentence; None for a graph that was rewritten.
            A graph that was left has no nodes.
        ends_with: why the program broke off here, and another graph follows; None where it returns.
        before, after: the graph as captured and as rewritten, with its inputs and its output.
        backward: the backward of the graph, in program order; only in plans that `explain` makes.
        saved: what the forward keeps for the backward; only in plans that `explain` makes.
        cuts: what the planner weighed (planner/objective.py), in sixteenths of a byte; the first
            that has a node decided it: the last that was made, and at O2 those of products that
            came out FP32 before it.
        verification: what is found where the compiled code was compared with the graph, so far;
            None in plans that were read back or that compiled nothing.
    """

    level: str
    dtype: str
    device: str
    nodes: tuple[PlanNode, ...] = ()
    casts: int = 0
    scaled: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    tensor_cores: TensorCoreReport = TensorCoreReport()
    dump_dir: Path | None = None
    left: str | None = None
    ends_with: str | None = None
    before: tuple[Line, ...] = ()
    after: tuple[Line, ...] = ()
    backward: tuple[BackwardNode, ...] = ()
    saved: tuple[Saved, ...] = ()
    cuts: tuple[MinimumCut, ...] = ()
    verification: Verify | None = field(default=None, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `left` and `ends_with` are omitted if they are None."""
        data = dataclasses.asdict(dataclasses.replace(self, verification=None))
        for name in ("verification", "left", "ends_with"):
            if data[name] is None:
                del data[name]
        cores = self.tensor_cores
        data["tensor_cores"] |= {"share_before": cores.share_before, "share": cores.share}
        data["saved"] = [
            {**one, "dtype": str(one["dtype"]).removeprefix("torch.")} for one in data["saved"]
        ]
        data["dump_dir"] = str(self.dump_dir) if self.dump_dir else None
        return data

    def weighed(self, names: Iterable[str]) -> Iterator[Weighed]:
        """What the planner weighed of these nodes, and of whether their results are rounded."""
        asked = {name for node in names for name in (node, node + OF_RESULT)}
        for cut in self.cuts:
            yield from cut.weighed(asked)
            asked -= set(cut.items)

    @property
    def low_dtypes(self) -> list[str]:
        """What is LOW in it: `["bfloat16"]`; the graph's dtype if nothing is."""
        own = (n.low or self.dtype for n in self.nodes if n.precision == "LOW" and not n.is_added)
        return list(dict.fromkeys(own)) or [self.dtype]

    def counts(self) -> dict[str, int]:
        """How many operators are LOW, FULL and KEEP, without casts and scaling."""
        return dict(Counter(n.precision for n in self.nodes if not n.is_added))

    def head(self, number: str = "") -> str:
        """What the plan of a rewritten graph begins with; `number` follows the device."""
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts().items()))
        low = "/".join(self.low_dtypes)
        text = f"{self.level} {low} on {self.device}{number}: {self.casts} casts, {counts}"
        if hidden := sum(node.products for node in self.nodes):
            text += f"; matrix products in opaque calls, all FP32: {hidden}"
        return text


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
    graphs: tuple[GraphData, ...]
    modules: tuple[ModuleLine, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    gpu: GPU | None = None
    repairs: tuple[str, ...] = ()
    outside: tuple[OutsideLine, ...] = ()
    share_in_graphs: float = 1.0

    @property
    def title(self) -> str:
        """What its text begins with: `"GPT at O1"`."""
        return f"{self.model} at {self.level}"

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
