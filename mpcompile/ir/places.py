"""Where in the user's program a node comes from: what stays the same when the program is captured
again, with other sizes or after another graph break, while names of nodes may change.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx

from .text import module_path, source
from .values import op_name


@dataclass(frozen=True)
class Place:
    """The place of one operator.

    Attributes:
        module, source, op: as in a plan.
        number: which one it is, of those in the graph that share all of these.
    """

    module: str
    source: str
    op: str
    number: int


def places(graph: fx.Graph) -> dict[str, Place]:
    """The place of each operator of a captured graph, before any pass, by its name."""
    found: dict[str, Place] = {}
    seen: Counter[tuple[str, str, str]] = Counter()
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            where = module_path(node), source(node), op_name(node)
            found[node.name] = Place(*where, seen[where])
            seen[where] += 1
    return found
