"""What was decided about a node, and what passes leave on it for later ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..rules.policy import Precision
from .shapes import Alignment, Padding
from .values import aten


@dataclass(frozen=True, eq=False)
class Region:
    """An activation checkpoint whose body was inlined: what is needed to fold it back."""

    kwargs: dict[str, Any]
    body_meta: dict[str, Any]


def regions(node: fx.Node) -> tuple[Region, ...]:
    """The checkpoints around the node, outermost first."""
    path: tuple[Region, ...] = node.meta.get("mp_region", ())
    return path


def set_regions(nodes: Iterable[fx.Node], path: tuple[Region, ...]) -> None:
    for node in nodes:
        node.meta["mp_region"] = path


@dataclass(frozen=True)
class Mark:
    """A decision about one node.

    Attributes:
        precision: LOW or FULL once planned; KEEP leaves captured dtypes; FOLLOW is undecided.
        rule: who decided: "table", "policy", "guard", "region", "plan", "kernel", "alias", ...
        reason: one sentence for people.
        low: the low dtype this node runs in (an autocast region may name another than the rest).
    """

    precision: Precision
    rule: str
    reason: str
    low: torch.dtype


def mark(node: fx.Node) -> Mark:
    """The node's decision; classify gives one to every node that computes a tensor."""
    return node.meta["mp"]  # type: ignore[no-any-return]


def precision(node: fx.Node) -> Precision | None:
    """The node's class, or None for inputs, constants and the output."""
    return node.meta["mp"].precision if "mp" in node.meta else None


def is_marked(node: fx.Node) -> bool:
    return "mp" in node.meta


def set_mark(node: fx.Node, value: Mark) -> None:
    node.meta["mp"] = value


def set_mutable(node: fx.Node) -> None:
    """Note that some node writes this value's memory: a cast of it must be taken where it is used,
    never shared.
    """
    node.meta["mp_mutable"] = True


def set_copy(node: fx.Node, *, of: int) -> None:
    """Note that this input is the working copy, in the low dtype, of the parameter that the caller
    hands over as input `of`.
    """
    node.meta["mp_copy"] = of


def copy_of(node: fx.Node) -> int | None:
    """Of which input (by number) this one is the working copy, if it is one."""
    return node.meta.get("mp_copy")


def is_mutable(node: fx.Node) -> bool:
    return "mp_mutable" in node.meta


def set_stored_low(node: fx.Node) -> None:
    """Note that the node's FP32 result is rounded to the low dtype where it is made."""
    node.meta["mp_stored_low"] = True


def is_stored_low(node: fx.Node) -> bool:
    return "mp_stored_low" in node.meta


def set_costs(node: fx.Node, value: dict[str, dict[str, int]]) -> None:
    """Note what either precision would cost: "low", "full" -> term -> bytes of traffic."""
    node.meta["mp_costs"] = value


def costs(node: fx.Node) -> dict[str, dict[str, int]] | None:
    """What the planner weighed, or None where it had nothing to decide."""
    found: dict[str, dict[str, int]] | None = node.meta.get("mp_costs")
    return found


def set_alignment(node: fx.Node, value: Alignment) -> None:
    node.meta["mp_alignment"] = value


def alignment(node: fx.Node) -> Alignment | None:
    """What was decided about the dims of a product, or None for other nodes."""
    found: Alignment | None = node.meta.get("mp_alignment")
    return found


def set_padding(node: fx.Node, value: Padding) -> None:
    node.meta["mp_padding"] = value


def padding(node: fx.Node) -> Padding | None:
    """The shapes that the node is to read and to give, or None: as captured."""
    found: Padding | None = node.meta.get("mp_padding")
    return found


def remark(node: fx.Node, **changes: Any) -> None:
    node.meta["mp"] = replace(node.meta["mp"], **changes)


def is_cast(node: fx.Node) -> bool:
    """A cast of ours (captured programs may hold `aten.to` of their own)."""
    return node.target is aten.to.dtype and is_marked(node) and mark(node).rule == "cast"


def copies_for_overlap(node: fx.Node) -> bool:
    """Whether the node is, scaled or not, the copy of a result that overlaps (copy_overlaps)."""
    while is_marked(node) and mark(node).rule == "scale":
        node = node.all_input_nodes[0]
    return is_marked(node) and mark(node).rule == "copy"


def is_write_back(node: fx.Node) -> bool:
    """Whether the node writes an input of the graph, and autograd sees it (scale_gradients)."""
    return node.target is aten.copy_.default and is_marked(node) and mark(node).rule == "scale"
