"""What the values of a graph are read from."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx


def all_before(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These nodes, and all that they depend on."""
    found = set(nodes)
    waiting = list(found)
    while waiting:
        new = [n for n in waiting.pop().all_input_nodes if n not in found]
        found.update(new)
        waiting += new
    return found
