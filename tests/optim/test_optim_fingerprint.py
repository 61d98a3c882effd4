"""What a step asks of all tensors at once is answered as one by one."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mpcompile.optim import rests_on
from mpcompile.optim.members import Member
from mpcompile.optim.rests_on import Alike, Fact, Fingerprint, State, same

FACTS = {
    "dtype and layout": rests_on.DTYPE_AND_LAYOUT,
    "shape": rests_on.SHAPE,
    "stride": rests_on.STRIDE,
}


def tensors() -> list[torch.Tensor]:
    return [nn.Parameter(torch.ones(4, 6)), torch.ones(()), torch.ones(2, 3, 4, 5), torch.ones(0)]


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nothing": lambda t: t,
    "values": lambda t: t.detach() + 1,
    "class": lambda t: nn.Parameter(t.detach()),
    "requires grad": lambda t: t.detach().clone().requires_grad_(),
    "dtype": lambda t: t.detach().double(),
    "shape": lambda t: t.detach().reshape(2, 12),
    "strides": lambda t: t.detach().reshape(6, 4).t(),
    "sparse": lambda t: t.detach().to_sparse(),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize(
    "asked", [("dtype and layout", "shape", "stride"), ("dtype and layout", "stride"), ("shape",)]
)
def test_the_answer_is_that_of_the_facts_and_is_the_same_again(
    name: str, asked: tuple[str, ...]
) -> None:
    facts = [FACTS[fact] for fact in asked]
    before = tensors()
    alike = Alike(before, *facts)
    for _ in range(2):  # what differs in nothing that was asked for is asked faster from then on
        for index in (0, 2) if name in ("nothing", "values") else (0,):
            after = list(before)
            after[index] = CHANGES[name](before[index])
            expected = _answers(before, after, asked)
            # A guard may know more than was asked for, but is not asked alone.
            assert alike.holds(after) is expected
            assert alike.holds(before)


def _answers(before: list[torch.Tensor], after: list[torch.Tensor], asked: tuple[str, ...]) -> bool:
    for fact in asked:
        if [FACTS[fact](t) for t in before] != [FACTS[fact](t) for t in after]:
            return False
    return True


def test_the_answer_does_not_depend_on_the_threads_state() -> None:
    held = tensors()
    alike = Alike(held, rests_on.DTYPE_AND_LAYOUT, rests_on.SHAPE, rests_on.STRIDE)
    with torch.autocast("cpu"), torch.inference_mode():
        assert alike.holds(held)
    with torch.no_grad():
        assert alike.holds(held)


def test_another_number_of_tensors_is_not_alike() -> None:
    held = tensors()
    alike = Alike(held, rests_on.SHAPE)
    assert not alike.holds(held[:-1])
    assert not alike.holds([*held, held[0]])
    assert not alike.holds([])
    assert Alike([], rests_on.SHAPE).holds([])
    assert not Alike([], rests_on.SHAPE).holds(held)


# -- a state ---------------------------------------------------------------------------------------


class Owner:
    """What has a state, as an optimizer does."""

    def __init__(self) -> None:
        params = torch.ones(2), torch.zeros(2)
        self.state: Any = {p: {"step": 1.0, "moment": torch.ones(2)} for p in params}

    def known(self, *params: torch.Tensor) -> State:
        optimizer: Any = self
        return State(optimizer, [Member(0, p) for p in params])


CHANGED: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "gone": lambda s, p: s.pop(p),
    "other entries": lambda s, p: operator.setitem(s, p, dict(s[p])),
    "tensor": lambda s, p: operator.setitem(s[p], "moment", torch.ones(2)),
    "number": lambda s, p: operator.setitem(s[p], "step", float("2")),
    "lost": lambda s, p: s[p].pop("step"),
    "renamed": lambda s, p: operator.setitem(s[p], "other", s[p].pop("moment")),
}
UNCHANGED: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "of another": lambda s, p: operator.setitem(s, torch.ones(2), {}),
    "one more": lambda s, p: operator.setitem(s[p], "more", None),
    "an equal number": lambda s, p: operator.setitem(s[p], "step", float("1")),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_state_is_told_from_another(name: str) -> None:
    owner: Any = Owner()
    known = owner.known(*owner.state)
    assert known.holds(owner)
    CHANGED[name](owner.state, [*owner.state][-1])
    for _ in range(2):
        assert not known.holds(owner)
        assert known.broken_by(owner) == "other tensors in its state"


@pytest.mark.parametrize("name", UNCHANGED)
def test_a_state_holds_where_what_was_known_is_there(name: str) -> None:
    owner: Any = Owner()
    known = owner.known(*owner.state)
    UNCHANGED[name](owner.state, [*owner.state][-1])
    assert not known._is_untouched(owner.state)
    assert known.holds(owner)
    assert known._is_untouched(owner.state)  # asked faster from then on


# -- all facts -------------------------------------------------------------------------------------


def test_a_fingerprint_says_what_has_changed_first() -> None:
    facts = [Fact(f"another {key}", operator.itemgetter(key), {"a": 1, "b": 2}) for key in "ab"]
    fingerprint = Fingerprint(*facts)
    for now, why in (
        ({"a": 1, "b": 2}, None),
        ({"a": 1, "b": 3}, "another b"),
        ({"a": 0, "b": 3}, "another a"),
    ):
        assert fingerprint.holds(now) is (why is None)
        assert fingerprint.broken_by(now) == why


def test_tensors_are_the_same_only_as_objects() -> None:
    one = torch.ones(1)
    assert same([one, 0.5, (1, 2)], [one, float("0.5"), (1, 2)])
    assert not same([one], [torch.ones(1)])
    assert not same([1.0], [one])
    assert not same([one], [one, one])
