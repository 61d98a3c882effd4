"""cut: the cheapest labelling, against every labelling there is."""

import itertools
from collections.abc import Mapping, Sequence
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from mpcompile.planner.min_cut import NEVER, minimum_cut

Pairs = dict[tuple[int, int], tuple[int, int]]
Problem = tuple[list[int], list[int], Pairs]


def total(
    labels: Sequence[bool],
    low: Sequence[int],
    full: Sequence[int],
    pairs: Mapping[tuple[int, int], tuple[int, int]],
) -> int:
    own = sum(a if is_low else b for is_low, a, b in zip(labels, low, full, strict=True))
    for (a, b), (a_low, b_low) in pairs.items():
        if labels[a] != labels[b]:
            own += a_low if labels[a] else b_low
    return own


def all_best(low: list[int], full: list[int], pairs: Pairs) -> list[tuple[bool, ...]]:
    """The labellings of least cost."""
    every = list(itertools.product((False, True), repeat=len(low)))
    least = min(total(labels, low, full, pairs) for labels in every)
    return [labels for labels in every if total(labels, low, full, pairs) == least]


# Few values, so that ties are common; 0 and NEVER among them.
COSTS = st.sampled_from([0, 0, 1, 2, 3, 7, 50, NEVER])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    count = draw(st.integers(0, 9))
    low, full = (draw(st.lists(COSTS, min_size=count, max_size=count)) for _ in range(2))
    edges = [(a, b) for a in range(count) for b in range(count) if a != b]
    chain = list(itertools.pairwise(range(count)))
    chosen = chain if draw(st.booleans()) else []
    if edges:
        chosen = chosen + draw(st.lists(st.sampled_from(edges), max_size=2 * count))
    return low, full, {edge: (draw(COSTS), draw(COSTS)) for edge in chosen}


@settings(deadline=None, max_examples=400)
@given(problems())
def test_the_total_is_the_least_and_the_low_items_are_the_fewest(problem: Problem) -> None:
    low, full, pairs = problem
    best = all_best(low, full, pairs)
    found = tuple(minimum_cut(low, full, pairs))
    assert found in best
    assert [labels for labels in best if sum(labels) <= sum(found)] == [found]


@settings(deadline=None, max_examples=200)
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_items_and_pairs_changes_nothing(problem: Problem, random: Random) -> None:
    low, full, pairs = problem
    place = list(range(len(low)))
    random.shuffle(place)
    moved_low, moved_full = [0] * len(low), [0] * len(low)
    for item, new in enumerate(place):
        moved_low[new], moved_full[new] = low[item], full[item]
    edges = list(pairs.items())
    random.shuffle(edges)
    moved = {(place[a], place[b]): cost for (a, b), cost in edges}
    found = minimum_cut(moved_low, moved_full, moved)
    assert [found[new] for new in place] == minimum_cut(low, full, pairs)
    assert minimum_cut(low, full, pairs) == minimum_cut(low, full, pairs)


def test_a_long_chain_is_decided_from_its_ends() -> None:
    """A thousand items that nothing but their neighbours decides, with a weak spot."""
    count = 1000
    low, full = [0] * count, [0] * count
    full[0] = low[-1] = NEVER
    pairs = {(i, i + 1): (7, 7) for i in range(count - 1)}
    pairs[400, 401] = (3, 3)
    assert minimum_cut(low, full, pairs) == [True] * 401 + [False] * 599


def test_parts_that_nothing_joins() -> None:
    """Each has a best label of its own, and a cycle inside that is decided only as a whole."""
    low: list[int] = []
    full: list[int] = []
    pairs: Pairs = {}
    expected: list[bool] = []
    for start, wanted in ((0, True), (3, False), (6, True)):
        low += [4, 0, 0] if wanted else [5, 0, 0]
        full += [0, 0, 5] if wanted else [0, 0, 4]
        ring = [start, start + 1, start + 2]
        pairs |= dict.fromkeys(zip(ring, [*ring[1:], start], strict=True), (9, 9))
        expected += [wanted] * 3
    assert minimum_cut(low, full, pairs) == expected


def test_never_is_above_any_sum() -> None:
    """A terabyte, in sixteenths of a byte, in each of fifty thousand nodes."""
    assert NEVER > 16 * 10**12 * 50_000
