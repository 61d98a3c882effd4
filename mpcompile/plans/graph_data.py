"""The data of one graph's plan: every node, its precision, and the reason. It can't show itself."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import ir
from ..verify.verdicts import Verify
from .change import Changeable
from .saved_bytes import Saved
from .tensor_cores import TensorCoreReport

_ADDED = {role.value for role in ir.ADDED}


@dataclass(frozen=True)
class Line:
    """One line of a graph: the node's `name`, its `text` as in a dump, and the nodes it `reads`."""

    name: str
    text: str
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanNode(Changeable):
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
        costs: the costs that the planner weighed ("low", "full" -> term -> bytes of memory traffic;
            see planner/objective.py), or None where it had nothing to decide.
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
    costs: dict[str, dict[str, int]] | None = None
    products: int = 0
    frames: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    low: str = ""

    @property
    def is_added(self) -> bool:
        """Whether a pass put the node there: a cast, a pad, or what scales a gradient."""
        return self.rule in _ADDED


@dataclass(frozen=True)
class BackwardNode:
    """One operator of the backward, in the program that AOTAutograd's partitioner makes.

    Attributes:
        name, op: in that program: `"mm_1"`, `"aten::mm"`.
        result: type of its result, `"f16[8, 4]"`.
        forward: the name of the plan's node whose gradient it computes, or that it computes again;
            "" if torch does not tell.
        recomputed: whether it computes a value of the forward again.
    """

    name: str
    op: str
    result: str
    forward: str
    recomputed: bool = False


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
    verification: Verify | None = field(default=None, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `left` and `ends_with` are omitted if they are None."""
        data = dataclasses.asdict(dataclasses.replace(self, verification=None))
        del data["verification"]
        for name in ("left", "ends_with"):
            if data[name] is None:
                del data[name]
        data["tensor_cores"] |= {
            "share_before": self.tensor_cores.share_before,
            "share": self.tensor_cores.share,
        }
        data["saved"] = [one.to_dict() for one in self.saved]
        data["dump_dir"] = str(self.dump_dir) if self.dump_dir else None
        return data

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
