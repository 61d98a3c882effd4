"""The file of a page: its template, style, scripts and data in one text; and what is on the page of
a plan: the numbers and sentences on top, and the data that the scripts read.
"""

from __future__ import annotations

import base64
import dataclasses
import difflib
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ...ir.text import scaled
from ...planner.min_cut import OF_RESULT
from ...planner.plan_data import GraphData, Line, PlanData, PlanNode
from ...planner.plan_text import bytes_by_dtype, dtype_word, has_units, outside, verdict
from ...planner.why import what_was_weighed
from ...rules.policy import around

_HERE = Path(__file__).parent
_SCRIPTS = (
    "elements.js", "nodes.js", "tree.js", "rows.js", "tables.js", "panel.js", "main.js"
)  # fmt: skip


@dataclass(frozen=True)
class BarSegment:
    """One part of a bar: `precision` gives its colour; `amount` is its length, `shown` as text."""

    label: str
    precision: str
    amount: float
    shown: str


@dataclass(frozen=True)
class Chart:
    """Stacked bars: a title, what they are together, label -> the parts of each bar, and a note."""

    title: str
    total: str
    bars: dict[str, list[BarSegment]]
    note: str = ""


# What a page may lack.
_NOTHING: dict[str, Any] = {"verdict": (), "tiles": (), "charts": (), "notes": {}, "numbers": None}


def html(**page: Any) -> str:
    """The file of a page; the same text for the same page.

    Its content security policy allows no request, and no style or script but its own, so that a
    name in the user's program can't become part of the page.

    Args:
        model, about: its title.
        facts: what stands beside the title: "level" -> "O1".
        views: the tabs of the list of nodes, by the names that `rows.js` and `tables.js` have.
        data: what the scripts read; `data_of` says what is in it.
        verdict: sentences on top, the most important first.
        tiles, charts: the summary below it. A tile is one number: what it is, the number, and what
            to know about it.
        notes: title -> the sentences under it; none without sentences is shown. `warnings` are
            notes that the user should look at, and stand first.
        numbers: what stands on the page of a report alone: "faults" and the histogram.
    """
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    style, script = _joined("page.css"), _joined(*_SCRIPTS)
    hashes = {"style_hash": _hash(style), "script_hash": _hash(script)}
    template = environment.get_template("page.html")
    return template.render(page={**_NOTHING, **page}, style=style, script=script, **hashes)


def _joined(*names: str) -> str:
    return "\n".join((_HERE / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    """As a content security policy names an inline style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


VIEWS = {"decisions": "Decisions", "graph": "Before and after", "backward": "Backward"}


def render(plan: PlanData) -> str:
    """The page of a plan; the same text for the same plan."""
    facts = {"level": plan.level, "low dtype": ", ".join(_low_dtypes(plan.graphs))}
    facts["device"] = plan.gpu.name if plan.gpu else plan.device
    facts |= {"graphs": str(len(plan.graphs)), "casts": str(plan.casts)}
    return html(
        model=plan.model,
        about="mixed-precision plan",
        facts={**facts, **plan.versions},
        views=VIEWS,
        data={
            **data_of(plan.dtype, plan.graphs, units=has_units(plan.device, plan.gpu)),
            "modules": list(_modules(plan)),
        },
        verdict=tuple(line.strip() for line in verdict(plan.title, plan.graphs)),
        charts=tuple(charts_of(plan)),
        warnings={
            "Graphs left in FP32": plan.left,
            "Graph breaks": plan.breaks,
            "Outside of the graphs": (outside(plan),) if plan.outside else (),
            "Repairs": plan.repairs,
        },
        notes={
            "Sizes worth changing": plan.tensor_cores.advice,
            "Not known without the GPU": plan.unknown,
        },
    )


# -- the summary -----------------------------------------------------------------------------------


def charts_of(plan: PlanData) -> Iterator[Chart]:
    """Nodes by precision, FLOPs by eligibility, and saved bytes by dtype."""
    nodes = Counter(node.precision for node in plan.nodes if _counts(node))
    words = {
        "LOW": f"LOW, {'/'.join(map(dtype_word, _low_dtypes(plan.graphs)))}",
        "FULL": "FULL, FP32",
        "KEEP": "KEEP, as captured",
    }
    operators = [BarSegment(words[p], p, nodes[p], str(nodes[p])) for p in words if nodes[p]]
    yield Chart("Operators by precision", str(nodes.total()), {"": operators})
    report = plan.tensor_cores
    if report.flops and has_units(plan.device, plan.gpu):
        shares = {"as captured": report.share_before, "as compiled": report.share}
        if report.share_before == report.share:
            shares = {"": report.share}
        bars = {name: _eligible(share) for name, share in shares.items()}
        yield Chart("FLOPs of matrix products", scaled(report.flops, "FLOP"), bars)
    if saved := sorted(bytes_by_dtype(plan).items(), key=lambda pair: -pair[1]):
        parts = [
            BarSegment(name, _precision(name), size, scaled(size, "B")) for name, size in saved
        ]
        copied = sum(one.bytes for one in plan.saved if one.copied)
        note = f"{scaled(copied, 'B')} of it copies of weights and inputs" if copied else ""
        yield Chart("Saved for the backward", scaled(plan.saved_bytes, "B"), {"": parts}, note)


def _low_dtypes(graphs: Sequence[GraphData]) -> list[str]:
    return list(dict.fromkeys(low for graph in graphs for low in graph.low_dtypes))


def _eligible(share: float) -> list[BarSegment]:
    parts = [
        BarSegment("eligible for Tensor Cores", "LOW", share, f"{share:.1%}"),
        BarSegment("not eligible", "FULL", 1 - share, f"{1 - share:.1%}"),
    ]
    return [part for part in parts if part.amount]


# -- the data --------------------------------------------------------------------------------------


def data_of(dtype: str, graphs: Sequence[GraphData], *, units: bool) -> dict[str, Any]:
    """What the scripts read of graphs; `units`: whether the device has Tensor Cores.

    A plan has "modules" beside it; a report has "updates", and its nodes have "numbers".
    """
    return {"low": dtype_word(dtype), "units": units, "graphs": [_graph(graph) for graph in graphs]}


def _graph(graph: GraphData) -> dict[str, Any]:
    products = {op.name: dataclasses.asdict(op) for op in graph.tensor_cores.ops}
    low = {node.name: dtype_word(node.low or graph.dtype) for node in graph.nodes}
    weighed: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in graph.weighed(low):
        name = one.name.removesuffix(OF_RESULT)
        grid, notes = what_was_weighed(one, low[name])
        weighed[name].append({"heads": grid.heads, "rows": grid.rows, "notes": notes})
    return {
        "left": graph.left,
        "ends_with": graph.ends_with,
        "nodes": [
            {
                **dataclasses.asdict(node),
                # what a pass made has a result of type None in the FP32 program
                "captured": None if node.is_added or node.captured == "NoneType" else node.captured,
                "low": low[node.name],
                "added": node.is_added,
                "counter": _is_counter(node),
                "change": node.change,
                "product": products.get(node.name),
                "weighed": weighed[node.name],
            }
            for node in graph.nodes
        ],
        "before": [[line.name, line.text] for line in graph.before],
        "after": [[line.name, line.text, line.reads] for line in graph.after],
        "rows": list(aligned(graph.before, graph.after)),
        "backward": [
            # coloured by the dtype of its result
            {**dataclasses.asdict(n), "precision": _precision(n.result.lstrip("(").split("[")[0])}
            for n in graph.backward
        ],
    }


def _is_counter(node: PlanNode) -> bool:
    """Whether it counts in place, as a batch norm does its batches: there is nothing to decide."""
    return node.op.endswith("_") and node.planned.startswith("i")


def _counts(node: PlanNode) -> bool:
    """Whether it is one of the operators by precision."""
    return not node.is_added and not _is_counter(node)


def aligned(
    before: Sequence[Line], after: Sequence[Line]
) -> Iterator[tuple[int | None, int | None]]:
    """The lines side by side: pairs of positions, None where a side has no such node.

    A node that a pass has moved past another one stands in two rows, removed and added.
    """
    names = [line.name for line in before], [line.name for line in after]
    matcher = difflib.SequenceMatcher(None, *names, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            yield from zip(range(a, b), range(c, d), strict=True)
        else:
            yield from ((k, None) for k in range(a, b))
            yield from ((None, k) for k in range(c, d))


def _precision(short: str) -> str:
    """Short name of a dtype -> the precision whose colour shows it."""
    return {"f16": "LOW", "bf16": "LOW", "f32": "FULL"}.get(short, "KEEP")


def _modules(plan: PlanData) -> Iterator[dict[str, Any]]:
    """The modules from the root down, each before its children, with the nodes in and below it."""
    kinds = {"": plan.model} | {module.path: module.kind for module in plan.modules}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for node in plan.nodes:
        for path in dict.fromkeys(["", *reversed(around(node.module)), node.module]):
            kinds.setdefault(path, "")
            if _counts(node):
                counts[path][node.precision] += 1
    children: dict[str, list[str]] = defaultdict(list)
    for path in kinds:
        if path:
            children[path.rpartition(".")[0]].append(path)
    todo = [""]
    while todo:
        path = todo.pop()
        todo += reversed(children[path])
        has = {"counts": counts[path], "parent": bool(children[path])}
        yield {"path": path, "kind": kinds[path], **has}
