"""A fault: what went wrong, at which node, and which nodes to keep in FP32; and the records of one
graph's runs, from which faults are read.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..plans.graph_plan import PlanNode
from .numbers import Numbers
from .record import Record

_UNKNOWN = Numbers(amax=float("inf"))


class Kind(enum.Enum):
    """What is wrong. The values are words for people."""

    OVERFLOW = "overflow"
    BACKWARD = "overflow in the backward"
    OWN = "not finite, in FP32 either"
    UNDERFLOW = "underflow in the backward"
    INACCURATE = "inaccurate"


@dataclass(frozen=True)
class Fault:
    """One thing that went wrong.

    Attributes:
        kind: what.
        node: the operator whose line to look at, with its module, source line and frames.
        reason: what happened there, in one sentence.
        amax: the largest magnitude of the exact value or gradient; infinity if it isn't known.
        pins: the nodes to keep in FP32, for `Policy(nodes=...)`; empty where that doesn't help.
        graph: the number of the graph in the model's forward.
    """

    kind: Kind
    node: PlanNode
    reason: str
    amax: float = float("inf")
    pins: tuple[str, ...] = ()
    graph: int = 0

    def __str__(self) -> str:
        where = self.node.module or "the model itself"
        if self.node.source:
            where += f" ({self.node.source})"
        lines = [f"{self.kind.value}: {where}: {self.node.name} = {self.node.op}", self.reason]
        if len(self.node.frames) > 1:
            lines.append("called from " + " < ".join(reversed(self.node.frames[:-1])))
        if self.pins:
            pins = ", ".join(f"{name!r}: 'fp32'" for name in self.pins)
            lines.append(f"to keep it in FP32: policy=Policy(nodes={{{pins}}})")
        return "\n    ".join(lines)


@dataclass(frozen=True)
class Runs:
    """The records of one graph.

    Attributes:
        low: of the rewritten graph.
        full: of the captured graph in FP32, or None; its backward may be missing.
        exact: of the captured graph in FP64, or None.
        scale: the loss scale that the rewritten graph ran with.
        loss: the loss of that run; None if it isn't known.
    """

    low: Record
    full: Record | None = None
    exact: Record | None = None
    scale: float = 1.0
    loss: float | None = None

    def amax(self, name: str) -> float:
        """The largest magnitude of a value in FP64, else in FP32; infinity if neither is known."""
        return self._known("values", name).amax

    def amin(self, name: str) -> float:
        """The same of the smallest magnitude above zero."""
        return self._known("values", name).amin

    def gradient_amax(self, name: str) -> float:
        """The same of the gradient of a value, without the loss scale."""
        return self._known("gradients", name).amax

    def _known(self, what: str, name: str) -> Numbers:
        found = [getattr(r, what) for r in (self.exact, self.full) if r is not None]
        return next((of[name] for of in found if name in of), _UNKNOWN)

    def bad_in_full(self, name: str) -> int | None:
        """How many elements of a value are not finite in FP32; None if that isn't known."""
        if self.full is None or name not in self.full.values:
            return None
        return self.full.values[name].bad
