"""The dump of one graph: its text as captured and after every pass, and the plan as JSON.

    graph_0/00_captured.txt            the FP32 program
            01_drop_noop_casts.txt ...
            20_outline.txt             the graph that AOTAutograd receives
            plan.json

The numbers count the passes that ran, so `disable_passes` shifts them. The first column of each
text tells what the pass did to the line: `+` new or decided anew, `-` removed, blank unchanged. A
decided line ends with its reason, its module and its source line.
"""

from __future__ import annotations

import difflib
import itertools
import json
from pathlib import Path

from torch import fx

from .. import ir
from .graph_plan import GraphPlan

_numbers = itertools.count()


class Dump:
    """Writes one graph's stages into a fresh directory under `root`: `graph_0`, `step_1`, ..."""

    def __init__(self, root: Path, kind: str = "graph") -> None:
        root.mkdir(parents=True, exist_ok=True)
        while True:
            self.directory = root / f"{kind}_{next(_numbers)}"
            try:
                self.directory.mkdir()
                break
            except FileExistsError:
                continue  # from an earlier process
        self._stage = 0
        self._previous: list[str] | None = None

    def stage(self, name: str, gm: fx.GraphModule, seconds: float) -> None:
        """Write the graph as it is after the named stage."""
        lines = ir.render(gm.graph, reasons=True).splitlines()
        if self._previous is None:
            body = lines
        else:
            body = [d for d in difflib.ndiff(self._previous, lines) if not d.startswith("?")]
        for name_of_body, module in gm.named_children():
            if isinstance(module, fx.GraphModule):
                body += ["", f"{name_of_body}:"]
                body += ["    " + text for text in ir.render(module.graph).splitlines()]
        title = f"# {name}: {len(lines)} lines, {seconds * 1e3:.1f} ms"
        path = self.directory / f"{self._stage:02}_{name}.txt"
        path.write_text("\n".join([title, *body]) + "\n", encoding="utf-8")
        self._previous = lines
        self._stage += 1

    def plan(self, plan: GraphPlan) -> None:
        text = json.dumps(plan.to_dict(), indent=1)
        (self.directory / "plan.json").write_text(text + "\n", encoding="utf-8")
