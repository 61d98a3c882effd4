"""The README's picture: a small graph as it was written, and as it is rewritten for a GPU.

`python -m benchmarks.before_after` plans the network below for an H100, which need not be there,
and draws what the plan says: docs/figures/before_after.svg.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.processes import ROOT
from mpcompile import plan_for
from mpcompile.plans.plan_data import PlanNode

WIDTH, MARGIN, BOX, OPERATOR, BETWEEN = 860, 16, 170, 34, 24
LEFT, RIGHT = MARGIN, 270
BACKWARD = "#2e7d32"
COLOURS = {"f32": ("#fde3cf", "#b4541a"), "f16": ("#d3e6fb", "#1c5fa8")}  # fill, line
WORDS = {"f32": "FP32", "f16": "FP16"}


class Network(nn.Module):
    """Two layers and a norm between them, with their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.head = (
            nn.Linear(512, 2048),
            nn.LayerNorm(2048),
            nn.Linear(2048, 1000),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(F.gelu(self.up(x)))), y)


def planned() -> list[PlanNode]:
    """The nodes of its plan at O1, in order."""
    batch = torch.randn(4096, 512), torch.randint(1000, (4096,))
    return list(plan_for(Network(), *batch, device="h100", dtype=torch.float16).nodes)


def drawn(nodes: list[PlanNode]) -> str:
    """The picture, as SVG."""
    y, parts, before = 66.0, [_heading()], 0.0
    weights = [node for node in nodes if node.name.endswith("_unscale")]
    parts.append(
        _between(y, f"backward: {len(weights)} gradients leave here, divided by the loss scale")
    )
    y += BETWEEN
    for node in nodes:
        if node in weights or _is_cast_of_weight(node, weights):
            continue
        if node.rule in ("cast", "scale"):
            parts.append(_between(y, _what(node, nodes, weights)))
            y += BETWEEN
            continue
        if before:
            parts += [_arrow(x, before + OPERATOR, y) for x in (LEFT, RIGHT)]
        parts += [_box(LEFT, y, node, node.captured), _box(RIGHT, y, node, node.planned)]
        parts.append(_text(RIGHT + BOX + 12, y + 18, node.reason.rpartition("; ")[2], size=12))
        before = y
        y += OPERATOR + 4
    height = y + MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" font-family="system-ui, sans-serif" '
        f'font-size="13">\n'
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def _heading() -> str:
    parts = [
        _text(LEFT, 24, "as you wrote it", weight="bold"),
        _text(RIGHT, 24, "as mpcompile plans it, O1, for an H100", weight="bold"),
        _text(LEFT, 44, "loss = cross_entropy(", colour="#555"),
        _text(LEFT + 12, 58, "head(norm(gelu(up(x)))), y)", colour="#555"),
    ]
    for i, (dtype, (fill, line)) in enumerate(COLOURS.items()):
        x = RIGHT + 330 + 70 * i
        parts.append(
            f'<rect x="{x}" y="14" width="12" height="12" fill="{fill}" stroke="{line}"/>'
            + _text(x + 17, 24, WORDS[dtype])
        )
    return "".join(parts)


def _text(
    x: float, y: float, text: str, *, colour: str = "#111", weight: str = "normal", size: int = 13
) -> str:
    look = f'fill="{colour}" font-weight="{weight}" font-size="{size}"'
    return f'<text x="{x}" y="{y}" {look}>{escape(text)}</text>'


def _is_cast_of_weight(node: PlanNode, weights: list[PlanNode]) -> bool:
    return node.rule == "cast" and any(weight.name in node.reads for weight in weights)


def _what(node: PlanNode, nodes: list[PlanNode], weights: list[PlanNode]) -> str:
    """In words, what stands between two operators."""
    if node.rule == "scale":
        return "backward: the gradient enters here, times the loss scale"
    text = f"cast to {WORDS[node.planned[:3]]}"
    reader = next(other for other in nodes if node.name in other.reads)
    casts = {other.name for other in nodes if _is_cast_of_weight(other, weights)}
    with_it = casts.intersection(reader.reads)
    return f"input and {len(with_it)} parameters {text}" if with_it else text


def _box(x: float, y: float, node: PlanNode, value: str) -> str:
    fill, line = COLOURS[value[:3]]
    name = node.op.removeprefix("aten::").removesuffix("_loss")
    where = f" ({node.module})" if node.module else ""
    return (
        f'<rect x="{x}" y="{y}" width="{BOX}" height="{OPERATOR - 8}" rx="4" fill="{fill}" '
        f'stroke="{line}"/>{_text(x + 8, y + 18, name + where)}'
    )


def _between(y: float, text: str) -> str:
    middle = RIGHT + BOX / 2
    colour = BACKWARD if text.startswith("backward") else "#555"
    return (
        f'<line x1="{middle}" y1="{y - 4}" x2="{middle}" y2="{y + BETWEEN - 4}" stroke="#999"/>'
        f"{_text(middle + 8, y + 13, text, colour=colour, size=12)}"
    )


def _arrow(x: float, start: float, end: float) -> str:
    middle = x + BOX / 2
    return f'<line x1="{middle}" y1="{start - 8}" x2="{middle}" y2="{end}" stroke="#999"/>'


if __name__ == "__main__":
    picture = Path(ROOT) / "docs" / "figures" / "before_after.svg"
    picture.write_text(drawn(planned()))
    print(f"wrote {picture.relative_to(ROOT)}")
