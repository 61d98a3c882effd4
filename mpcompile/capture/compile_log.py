"""What a compile writes on its way: the dump on disk, torch's trace, the log.

    graph_0/00_captured.txt            the FP32 program
            01_drop_noop_casts.txt ...
            20_outline.txt             the graph that AOTAutograd receives
            plan.json

The numbers of a dump count the passes that ran, so `disable_passes` shifts them. The first column
of each text tells what the pass did to the line: `+` new or decided again, `-` removed, blank
unchanged. A decided line ends with its reason, its module and its source line.

Torch's trace (`TORCH_TRACE=directory`), which `tlparse` shows, gets

    mpcompile_captured     the graph as captured, in FP32
    mpcompile_rewritten    the graph after all passes, with the reason of each decision
    mpcompile_plan         the plan, as JSON; of a graph that was left in FP32, the reason
    mpcompile_step         the program of a compiled optimizer step
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import fx

from .. import ir, logs
from ..errors import shortened
from ..planner.graph_plan import GraphPlan
from ..planner.plan_data import PlanNode
from ..torch_inside.names import trace_structured
from ..torch_inside.private_names import MissingInTorch

log = logging.getLogger("mpcompile")
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


def trace_graph(plan: GraphPlan, captured: fx.Graph, rewritten: fx.Graph) -> None:
    """Add a rewritten graph to the trace: as captured, and before checkpoints are folded back."""
    _artifact("captured", lambda: ir.render(captured).rstrip("\n"))
    _artifact("rewritten", lambda: ir.render(rewritten, reasons=True).rstrip("\n"))
    trace_plan(plan)


def trace_plan(plan: GraphPlan) -> None:
    """Add a plan to the trace."""
    _artifact("plan", lambda: json.dumps(plan.to_dict(), indent=1), encoding="json")


def trace_step(gm: fx.GraphModule) -> None:
    """Add the program of an optimizer's step to the trace."""
    _artifact("step", lambda: ir.render(gm.graph, reasons=True))


def _artifact(name: str, text: Callable[[], str], *, encoding: str = "string") -> None:
    with contextlib.suppress(MissingInTorch):
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": f"mpcompile_{name}", "encoding": encoding},
            payload_fn=text,
            expect_trace_id=False,  # no compile of Dynamo's surrounds that of an optimizer's step
        )


def log_graph(plan: GraphPlan, seconds: float) -> None:
    """Log what became of one graph.

    Args:
        seconds: wall time of the whole compile of this graph.
    """
    if plan.left is not None:
        logs.event(
            "fallback", logging.INFO, "left",
            "a graph on %(device)s stays in FP32: %(reason)s",
            device=plan.device, reason=plan.left, seconds=seconds,
        )  # fmt: skip
        return
    operators = {"LOW": 0, "FULL": 0, "KEEP": 0, **plan.counts()}
    capture = plan.seconds["capture"]
    logs.event(
        "compile", logging.INFO, "graph",
        "a graph at %(level)s in %(dtype)s on %(device)s: %(nodes)d operators, %(low)d low, "
        "%(casts)d casts; %(share).3f of the FLOPs of products can run on Tensor Cores; compiled "
        "in %(seconds).2f s (capture %(capture_seconds).2f, passes %(passes_seconds).2f)",
        level=plan.level, dtype=plan.dtype, device=plan.device,
        nodes=sum(operators.values()), low=operators["LOW"], full=operators["FULL"],
        kept=operators["KEEP"], casts=plan.casts, scaled=plan.scaled,
        share=plan.tensor_cores.share, seconds=seconds, capture_seconds=capture,
        passes_seconds=sum(plan.seconds.values()) - capture,
    )  # fmt: skip


@functools.cache
def say_nothing_runs_low(device: str, low: torch.dtype) -> None:
    """Log that a graph's products stay in FP32 under `dtype="auto"`, and what can be done.

    `device` is the kind of device as messages name it: "CPU", "GPU".
    """
    name = str(low).removeprefix("torch.")
    log.warning(
        "mpcompile: this %s has no instructions for products in %s, so they stay in FP32, as fast "
        "as torch.compile. To save memory instead: recompute=True, or dtype=torch.%s with "
        'level="O2"; `mpcompile profile` measures what pays here',
        device, name, name,
    )  # fmt: skip


def say_products_stay(nodes: Iterable[PlanNode]) -> None:
    """Log that matrix products of a graph stay in FP32, in bodies that no pass rewrites."""
    inside = [node for node in nodes if node.products]
    if inside:
        lines = list(dict.fromkeys(node.source or node.name for node in inside))
        _say_products_stay(sum(node.products for node in inside), shortened(lines))


@functools.cache
def _say_products_stay(count: int, where: str) -> None:
    log.warning(
        "mpcompile: %d matrix product%s in FP32 inside of calls whose bodies are not rewritten "
        "(torch.cond and its like, an autograd.Function): %s",
        count, "s stay" if count > 1 else " stays", where,
    )  # fmt: skip
