"""Pin what feeds an operator that would make more of its rounding."""

from __future__ import annotations

from torch import fx

from ..rules.policy import Precision
from .marks import By, mark, precision, remark
from .values import float_args


def pin_producers(reader: fx.Node, reason: str, *, products: bool) -> None:
    """Make FULL what the node reads, up through FOLLOW nodes to the first LOW one on each path; with
    `products` that one, too. The user's policy is not overruled.
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
