"""Choose one of two labels for each item at the least total cost: a minimum s-t cut. And what it
would cost at least if one of them had the other label.

With costs on items and on pairs of items that differ, none negative, the least total is the
capacity of a minimum cut between two terminals (Greig, Porteous, Seheult, "Exact maximum a
posteriori estimation for binary images", 1989).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

NEVER = 1 << 60  # a cost that no sum of others reaches
OF_RESULT = "'s result"  # ends the name of an item that says whether a node's result is rounded
_FULL, _LOW = -1, -2  # the terminals

_Room = dict[int, dict[int, int]]  # what more each arc can take


def _turned(room: _Room) -> _Room:
    return {a: {b: room[b][a] for b in near} for a, near in room.items()}


def _reached(room: _Room, start: int) -> dict[int, int]:
    """Where arcs with room lead to: node -> the one before it."""
    before = {start: start}
    for node in (work := [start]):  # the list grows as it is read
        fresh = [near for near, left in room[node].items() if left and near not in before]
        before.update(dict.fromkeys(fresh, node))
        work += fresh
    return before


def _changed_with(room: _Room, item: int, goal: int) -> set[int]:
    """What changes with an item that must have the other label, at the least total cost, and no
    more than that takes: the items that it still reaches when no more can be sent from it to the
    terminal of its label. How much was sent is what the total grows by.
    """
    room = {a: dict(near) for a, near in room.items()}
    while goal in (before := _reached(room, item)):
        path = [goal]
        while path[-1] != item:
            path.append(before[path[-1]])
        most = min(room[a][b] for b, a in pairwise(path))
        for b, a in pairwise(path):
            room[a][b] -= most
            room[b][a] += most
    return set(before)


@dataclass(frozen=True)
class Weighed:
    """The least totals with either label of an item, all others being free.

    Attributes:
        name, low: the item, and the label that it got.
        costs: term -> its cost as decided, and with the other label, of what differs.
        totals: as decided, and with the other label; `NEVER` or more if that is forbidden.
        others: the items that would change with it.
    """

    name: str
    low: bool
    costs: dict[str, tuple[int, int]]
    totals: tuple[int, int]
    others: tuple[str, ...]


@dataclass(frozen=True)
class MinimumCut:
    """The costs of a graph's items, in plain data that a plan keeps: it is solved again if someone
    asks what another choice would have cost. They are whole numbers, so that sums are exact and
    the answer is the same on every machine.

    Attributes:
        items: their names.
        low, full: term -> cost of either label, for each item; `NEVER` forbids it.
        pairs: (a, b, cost if a is low and b full, cost if a is full and b low).
    """

    items: tuple[str, ...]
    low: tuple[dict[str, int], ...]
    full: tuple[dict[str, int], ...]
    pairs: tuple[tuple[int, int, int, int], ...]

    def best(self) -> list[bool]:
        """Which items get the label low (True), at the least total cost; among assignments of equal
        cost, the one with the fewest low items.
        """
        return self._solved()[1]

    def weighed(self, names: Collection[str]) -> Iterator[Weighed]:
        """The answer for each item that has one of the names."""
        room, best = self._solved()
        sides = {}
        for label, goal, ahead in ((True, _LOW, room), (False, _FULL, _turned(room))):
            # No room leads from an item to the goal by way of one that has the other label.
            inside = {goal, *(i for i, low in enumerate(best) if low is label)}
            near = {a: {b: ahead[a][b] for b in ahead[a] if b in inside} for a in inside}
            sides[label] = near, goal
        total = self._spent(best, range(len(best))).total()
        for i in (i for i, name in enumerate(self.items) if name in names):
            changed = _changed_with(sides[best[i]][0], i, sides[best[i]][1])
            other = [low is not (j in changed) for j, low in enumerate(best)]
            now, then = (self._spent(labels, changed) for labels in (best, other))
            costs = {term: (now[term], then[term]) for term in {**now, **then}}
            yield Weighed(
                self.items[i],
                best[i],
                {term: both for term, both in costs.items() if both[0] != both[1]},
                (total, total + then.total() - now.total()),
                tuple(self.items[j] for j in sorted(changed - {i})),
            )

    def _solved(self) -> tuple[_Room, list[bool]]:
        """What the greatest flow from full to low leaves room for, and the labels."""
        arcs: Counter[tuple[int, int]] = Counter()
        for i, (low, full) in enumerate(zip(self.low, self.full, strict=True)):
            arcs[_FULL, i] = sum(low.values())  # cut where the item is low
            arcs[i, _LOW] = sum(full.values())
        for a, b, a_low, b_low in self.pairs:
            arcs[a, b] += b_low
            arcs[b, a] += a_low
        network: nx.DiGraph[int] = nx.DiGraph()
        network.add_nodes_from((_FULL, _LOW))
        network.add_weighted_edges_from(((*arc, cost) for arc, cost in arcs.items()), "capacity")
        flow = boykov_kolmogorov(network, _FULL, _LOW).adjacency()
        room = {a: {b: x["capacity"] - x["flow"] for b, x in near.items()} for a, near in flow}
        lowered = _reached(_turned(room), _LOW)
        return room, [i in lowered for i in range(len(self.items))]

    def _spent(self, low: Sequence[bool], items: Collection[int]) -> Counter[str]:
        """Term -> what these items cost, and the pairs that one of them is in."""
        spent: Counter[str] = Counter()
        for i in items:
            spent.update(self.low[i] if low[i] else self.full[i])
        for a, b, a_low, b_low in self.pairs:
            if low[a] != low[b] and (a in items or b in items):
                cost = a_low if low[a] else b_low
                spent["cast" if cost < NEVER else f"{self.items[a]} is FP32"] += cost
        return spent
