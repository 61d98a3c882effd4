"""Choose one of two labels for each item at the least total cost: a minimum s-t cut.

With costs on items and on pairs of items that differ, none negative, the least total is the
capacity of a minimum cut between two terminals (Greig, Porteous, Seheult, "Exact maximum a
posteriori estimation for binary images", 1989).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

NEVER = 1 << 60  # a cost that no sum of others reaches
_FULL, _LOW = "full", "low"  # the terminals


def minimum_cut(
    low: Sequence[int], full: Sequence[int], pairs: Mapping[tuple[int, int], tuple[int, int]]
) -> list[bool]:
    """Which items get the label low (True), at the least total cost.

    Costs are whole numbers, so that sums are exact and the answer is the same on every machine.
    Among assignments of equal cost, this returns the one with the fewest low items.

    Args:
        low, full: the cost of either label, for each item; `NEVER` forbids it.
        pairs: (a, b) -> (cost if a is low and b full, cost if a is full and b low).
    """
    network: nx.DiGraph[int | str] = nx.DiGraph()
    network.add_nodes_from((_FULL, _LOW))
    for item, costs in enumerate(zip(low, full, strict=True)):
        network.add_edge(_FULL, item, capacity=costs[0])  # cut where the item is low
        network.add_edge(item, _LOW, capacity=costs[1])
    for (a, b), (a_low, b_low) in pairs.items():
        for start, end, cost in ((a, b, b_low), (b, a, a_low)):
            known = network.get_edge_data(start, end, {"capacity": 0})["capacity"]
            network.add_edge(start, end, capacity=known + cost)
    _, (_, lowered) = nx.minimum_cut(network, _FULL, _LOW, flow_func=boykov_kolmogorov)
    return [item in lowered for item in range(len(low))]
