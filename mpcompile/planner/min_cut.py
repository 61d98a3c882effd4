"""Choose one of two labels for each item at the least total cost: a minimum s-t cut.

With costs on items and on pairs of items that differ, none negative, the least total is the
capacity of a minimum cut between two terminals (Greig, Porteous, Seheult, "Exact maximum a
posteriori estimation for binary images", 1989). An item that its neighbours alone decide never
enters the flow network, and parts of the network that no pair joins are cut separately.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

NEVER = 1 << 60  # a cost that no sum of others reaches


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
    costs = [list(both) for both in zip(full, low, strict=True)]  # [full, low], indexed by label
    pairs = _merged(pairs)
    around: list[list[tuple[int, int, int]]] = [[] for _ in costs]
    for (a, b), (a_low, b_low) in pairs.items():
        around[a].append((b, a_low, b_low))  # (other, cost if only I am low, if only it is)
        around[b].append((a, b_low, a_low))
    label: list[bool | None] = [None] * len(costs)
    ready = [i for i in range(len(costs)) if _certain(costs[i], around[i], label) is not None]
    while ready:
        item = ready.pop()
        if label[item] is None:
            label[item] = _certain(costs[item], around[item], label)
            for other, mine, theirs in around[item]:
                if label[other] is None:
                    costs[other][not label[item]] += mine if label[item] else theirs
                    if _certain(costs[other], around[other], label) is not None:
                        ready.append(other)
    network: nx.DiGraph[int] = nx.DiGraph()
    network.add_nodes_from(i for i, known in enumerate(label) if known is None)
    for (a, b), (a_low, b_low) in pairs.items():
        if label[a] is None and label[b] is None:
            network.add_edge(a, b, capacity=b_low)
            network.add_edge(b, a, capacity=a_low)
    for part in list(nx.weakly_connected_components(network)):
        lowered = _low_side(network.subgraph(part).copy(), costs)
        for item in part:
            label[item] = item in lowered
    return [bool(known) for known in label]


def _merged(
    pairs: Mapping[tuple[int, int], tuple[int, int]],
) -> dict[tuple[int, int], tuple[int, int]]:
    """The pairs with the smaller item first: (a, b) and (b, a) become one."""
    merged: dict[tuple[int, int], tuple[int, int]] = {}
    for (a, b), (a_low, b_low) in pairs.items():
        key, costs = ((a, b), (a_low, b_low)) if a < b else ((b, a), (b_low, a_low))
        known = merged.get(key, (0, 0))
        merged[key] = known[0] + costs[0], known[1] + costs[1]
    return merged


def _certain(
    costs: Sequence[int], around: Sequence[tuple[int, int, int]], label: Sequence[bool | None]
) -> bool | None:
    """The label that is best for the item whatever its undecided neighbours become, or None."""
    full, low = costs
    undecided = [(mine, theirs) for other, mine, theirs in around if label[other] is None]
    if low < full and full - low > sum(mine for mine, _ in undecided):
        return True
    if full <= low and low - full >= sum(theirs for _, theirs in undecided):
        return False
    return None


def _low_side(network: nx.DiGraph[int], costs: Sequence[Sequence[int]]) -> set[int]:
    """The low items of one connected part of the network."""
    source, sink = "full", "low"
    for item in list(network):
        full, low = costs[item]
        network.add_edge(source, item, capacity=low)  # cut where the item is low
        network.add_edge(item, sink, capacity=full)
    _, (_, lowered) = nx.minimum_cut(network, source, sink, flow_func=boykov_kolmogorov)
    return set(lowered) - {sink}
