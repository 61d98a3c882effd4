"""What was decided about a node, and what passes leave on it for later ones."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..rules.formats import FP32, Format
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


class By(enum.Enum):
    """Who decided a node's precision; what others may still change follows from it.

    TABLE     the operator's row, so guards and the planner may decide otherwise.
    KERNEL    the device has no low kernel.
    ALIAS     memory that is shared.
    GUARD     what the low dtype can't hold.
    POLICY    the user: nobody overrules it.
    REGION    an autocast region of the user's.
    CAPTURED  a value that must stay as it was captured.
    UPDATE    an update of parameters in place.
    PLAN      the planner.
    REWRITE   the pass that put the node there.
    """

    TABLE = "table"
    KERNEL = "kernel"
    ALIAS = "alias"
    GUARD = "guard"
    POLICY = "policy"
    REGION = "region"
    CAPTURED = "captured"
    UPDATE = "update"
    PLAN = "plan"
    REWRITE = "rewrite"


class Role(enum.Enum):
    """What a node is there for.

    PROGRAM  the user's program.
    CAST     a cast of ours (captured programs may hold casts of their own).
    SCALE    the loss scale enters, or leaves.
    PAD      padding, and what cuts it off.
    COPY     the copy of a result whose elements overlap.
    STEP     an optimizer step.
    """

    PROGRAM = "program"
    CAST = "cast"
    SCALE = "scale"
    PAD = "pad"
    COPY = "copy"
    STEP = "step"


# The roles of nodes that passes add to a program: they read and give the dtypes they are made with.
ADDED = frozenset({Role.CAST, Role.SCALE, Role.PAD})


@dataclass(frozen=True)
class Mark:
    """A decision about one node, and its explanation.

    Attributes:
        precision: LOW or FULL once planned; KEEP leaves captured dtypes; FOLLOW is undecided.
        by: who decided.
        reason: one sentence for people; nothing follows from it.
        format: the low format it runs in (an autocast region may name another than the rest).
        role: what the node is there for.
    """

    precision: Precision
    by: By
    reason: str
    format: Format
    role: Role = Role.PROGRAM

    @property
    def low(self) -> torch.dtype:
        """The dtype that the node computes in where it is LOW."""
        return self.format.compute

    @property
    def rule(self) -> str:
        """By which rule, for people."""
        return self.by.value if self.role is Role.PROGRAM else self.role.value


def added(role: Role, reason: str) -> Mark:
    """The mark of a node that a rewriting pass adds: it keeps the dtypes that it is made with."""
    return Mark(Precision.KEEP, By.REWRITE, reason, FP32, role)


def mark(node: fx.Node) -> Mark:
    """The node's decision; classify gives one to every node that computes a tensor."""
    return node.meta["mp"]  # type: ignore[no-any-return]


def role(node: fx.Node) -> Role | None:
    """What the node is there for, or None for inputs, constants and the output."""
    return mark(node).role if is_marked(node) else None


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
    return node.target is aten.to.dtype and role(node) is Role.CAST


def copies_for_overlap(node: fx.Node) -> bool:
    """Whether the node is, scaled or not, the copy of a result that overlaps (copy_overlaps)."""
    while role(node) is Role.SCALE:
        node = node.all_input_nodes[0]
    return role(node) is Role.COPY


def is_write_back(node: fx.Node) -> bool:
    """Whether the node writes an input of the graph, and autograd sees it (scale_gradients)."""
    return node.target is aten.copy_.default and role(node) is Role.SCALE
