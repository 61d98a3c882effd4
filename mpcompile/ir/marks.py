"""The decision about each node, and the notes that capture and passes leave on nodes for later
passes; and pins of what feeds an operator that would make more of its rounding.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import fx

from ..rules.policy import Precision
from .shapes import Alignment, Padding
from .values import aten, float_args

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Region:
    """An activation checkpoint whose body was inlined: the data needed to fold it back."""

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
    """Who decided a node's precision; this says who may still change it.

    TABLE     the operator's row in the table; guards and the planner may decide otherwise.
    KERNEL    the device has no kernel in the low dtype, or torch has a wrong one.
    ALIAS     the value shares memory with another.
    GUARD     the low dtype can't hold the values.
    POLICY    the user, whom only a wrong kernel overrules.
    REGION    an autocast region of the user's program.
    CAPTURED  the value must stay as it was captured.
    UPDATE    part of an in-place update of parameters.
    PLAN      the planner.
    REWRITE   the pass that added the node.
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
    """The purpose of a node.

    PROGRAM  part of the user's program.
    CAST     a cast that we added (captured programs may hold casts of their own).
    SCALE    part of loss scaling, which multiplies or divides gradients.
    PAD      adds padding, or cuts it off.
    LAYOUT   copies a value back into the memory layout that it was captured in.
    COPY     copies a result whose elements overlap in memory.
    KEPT     puts a value into memory of its own.
    FINITE   gives a buffer back what an overflow has written over.
    STEP     part of an optimizer step.
    """

    PROGRAM = "program"
    CAST = "cast"
    SCALE = "scale"
    PAD = "pad"
    LAYOUT = "layout"
    COPY = "copy"
    KEPT = "kept"
    FINITE = "finite"
    STEP = "step"


# The roles of nodes that passes add to a program; such a node keeps the dtypes it was made with.
ADDED = frozenset({Role.CAST, Role.SCALE, Role.PAD, Role.LAYOUT, Role.KEPT, Role.FINITE})


@dataclass(frozen=True)
class Mark:
    """A decision about one node, and its explanation.

    Attributes:
        precision: LOW or FULL once planned; KEEP leaves captured dtypes; FOLLOW is undecided.
        by: who decided.
        reason: one sentence for people; no code depends on it.
        low: the low dtype (an autocast region may name another than the rest has).
        role: the purpose of the node.
    """

    precision: Precision
    by: By
    reason: str
    low: torch.dtype
    role: Role = Role.PROGRAM

    @property
    def rule(self) -> str:
        """Who decided, or the role of a node that is not the program's, as a word for people."""
        return self.by.value if self.role is Role.PROGRAM else self.role.value


def added(role: Role, reason: str) -> Mark:
    """The mark of a node that a pass adds: the node keeps the dtypes that it is made with."""
    return Mark(Precision.KEEP, By.REWRITE, reason, torch.float32, role)


def mark(node: fx.Node) -> Mark:
    """The node's decision; `classify` makes one for every node that computes a tensor."""
    return node.meta["mp"]  # type: ignore[no-any-return]


def role(node: fx.Node) -> Role | None:
    """The purpose of the node, or None for inputs, constants and the output."""
    return mark(node).role if is_marked(node) else None


def precision(node: fx.Node) -> Precision | None:
    """The node's precision class, or None for inputs, constants and the output."""
    return node.meta["mp"].precision if "mp" in node.meta else None


def is_marked(node: fx.Node) -> bool:
    return "mp" in node.meta


def set_mark(node: fx.Node, value: Mark) -> None:
    node.meta["mp"] = value


# -- notes for later passes -----------------------------------------------------------------------


class Note(Generic[T]):
    """Something that is noted on nodes: called with a node, it gives what is, or None."""

    def __init__(self, entry: str) -> None:
        self._entry = entry

    def __call__(self, node: fx.Node) -> T | None:
        return node.meta.get(self._entry)

    def set(self, node: fx.Node, value: T) -> None:
        node.meta[self._entry] = value


is_mutable = Note[bool]("mp_mutable")
"""Some node writes this value's memory: each use needs a cast of its own, made just before it,
never a shared one."""

copy_of = Note[int]("mp_copy")
"""The input is the working copy, in the low dtype, of the parameter that is the caller's input of
this number."""

is_parameter = Note[bool]("mp_parameter")
"""The input holds an nn.Parameter."""

is_gradient = Note[bool]("mp_gradient")
"""The input holds the `.grad` of some tensor."""

stored = Note[torch.Tensor]("mp_stored")
"""The FakeTensor of an input as it is stored: in the low dtype, though the program was captured as
if it were FP32. It is FP32 for all passes until casts are placed."""

is_stored_low = Note[bool]("mp_stored_low")
"""The node computes in FP32, but all its readers get its result rounded to `low`."""

is_inner_gradient = Note[bool]("mp_inner_gradient")
"""The node is a part of a backward that the program runs inside of itself."""

min_cut = Note[Any]("mp_min_cut")
"""The planner's `MinimumCut` that decided the node, or whether its result is rounded; None: the
planner had nothing to decide."""

alignment = Note[Alignment]("mp_alignment")
"""The decision about the dims of a product; None: the node is none."""

padding = Note[Padding]("mp_padding")
"""The padded shapes of the node's operands and result; None: they are as captured."""


def is_low_input(node: fx.Node) -> bool:
    """Whether the node is an input that is `stored` in the low dtype."""
    return stored(node) is not None


def remark(node: fx.Node, **changes: Any) -> None:
    node.meta["mp"] = replace(node.meta["mp"], **changes)


def pin_producers(reader: fx.Node, reason: str, *, products: bool) -> None:
    """Make FULL what the node reads, up through FOLLOW nodes to the first LOW one on each path;
    with `products` that one, too. The user's policy is not overruled.
    """
    wanted = (Precision.FOLLOW, Precision.LOW) if products else (Precision.FOLLOW,)
    pending = [node for _, node in float_args(reader)]
    while pending:
        node = pending.pop()
        decided = precision(node)
        if decided not in wanted or mark(node).by is By.POLICY:
            continue
        remark(node, precision=Precision.FULL, by=By.GUARD, reason=reason)
        if decided is Precision.FOLLOW:
            pending += node.all_input_nodes


def stands_for(node: fx.Node, program: fx.Node) -> None:
    """Note that passes may take this node for one of the program's: it has replaced it."""
    for entry in ("mp_captured", "tensor_meta", "mp_mutable", "mp_stored_low"):
        if entry in program.meta:
            node.meta[entry] = program.meta[entry]


def is_cast(node: fx.Node) -> bool:
    """Whether a pass of ours added this cast (captured programs may hold `aten.to` calls too)."""
    return node.target is aten.to.dtype and role(node) is Role.CAST


def unadded(node: fx.Node) -> fx.Node:
    """The node of the program whose value this is, before the casts, pads and scaling of ours."""
    while role(node) in ADDED and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def copies_for_overlap(node: fx.Node) -> bool:
    """Whether the node, after any loss scaling, copies a result that overlaps (copy_overlaps)."""
    while role(node) is Role.SCALE:
        node = node.all_input_nodes[0]
    return role(node) is Role.COPY


def is_write_back(node: fx.Node) -> bool:
    """Whether the node writes to an input of the graph and autograd tracks it (scale_gradients)."""
    return node.target is aten.copy_.default and role(node) is Role.SCALE
