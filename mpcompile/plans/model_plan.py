"""The plan of a whole model: its data, and what shows, compares and stores it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import stored
from ..errors import MPCompileError
from ..planner import plan_text
from ..planner.graph_plan import GraphPlan
from ..planner.grid import Part, Shown, as_text
from ..planner.plan_data import PlanData
from ..planner.why import Answer, answer
from .diff import PlanDiff, difference
from .page.render import render


class Plan(Shown, PlanData):
    """What mpcompile does with a model: `PlanData` that prints itself and answers questions."""

    graphs: tuple[GraphPlan, ...]

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

    def full(self) -> Answer:
        """The plan node by node, with casts, what scales gradients, and the backward: text to
        print. `print(plan)` says what matters of it.
        """
        return Answer(as_text(plan_text.full_plan_parts(self)))

    def diff(self, other: Plan) -> PlanDiff:
        """What differs from another plan: of another level, policy, device or version.

        The result prints as tables, and is false if nothing differs.

        Raises:
            MPCompileError: `other` is no Plan.
        """
        return difference(self, other)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, totals included; `from_dict` reads it back."""
        data = {
            **dataclasses.asdict(dataclasses.replace(self, graphs=())),
            "graphs": [graph.to_dict() for graph in self.graphs],
            "casts": self.casts,
            "tensor_core_share": self.tensor_cores.share,
            "saved_bytes": self.saved_bytes,
            "saved_bytes_by_dtype": plan_text.bytes_by_dtype(self),
            "saved_bytes_copies_of_inputs": sum(one.bytes for one in self.saved if one.copied),
            "left_in_fp32": self.left,
            "graph_breaks": self.breaks,
            "unknown": self.unknown,
        }
        return {name: list(x) if isinstance(x, tuple) else x for name, x in data.items()}

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
        stored.write(json.dumps(self.to_dict(), indent=1) + "\n", path)

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
        stored.write(render(self), path)

    def _parts(self) -> Iterator[Part]:
        return plan_text.plan_parts(self)
