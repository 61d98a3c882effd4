"""What the values of a graph are read from, and in which precision."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from ..rules.rule import Kind
from .marks import Role, is_cast, role
from .values import dtype, kind


def reads_only_low(node: fx.Node, low: torch.dtype) -> bool:
    """Whether all that a rewritten graph reads of an FP32 value is its elements cast to `low`, so
    that the graph computes the same if they had been rounded to `low` before.

    The casts may come behind views and copies of elements (an embedding's result is cast).
    """
    return bool(node.users) and all(_passes_only_low(node, user, low) for user in node.users)


def _passes_only_low(node: fx.Node, user: fx.Node, low: torch.dtype) -> bool:
    if is_cast(user):
        return dtype(user) is low
    if user.op == "output" or not user.args or user.args[0] is not node:
        return False
    moves = role(user) is Role.SCALE or kind(user) in (Kind.VIEW, Kind.MOVE)
    return moves and reads_only_low(user, low)


def all_before(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These nodes, and all that they depend on."""
    found = set(nodes)
    waiting = list(found)
    while waiting:
        new = [n for n in waiting.pop().all_input_nodes if n not in found]
        found.update(new)
        waiting += new
    return found
