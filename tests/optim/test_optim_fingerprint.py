"""Whether a step is like the one before: what the facts of `optim/rests_on.py` notice, asked of all
tensors at once as one by one.
"""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mpcompile import MPOptimizer
from mpcompile.optim import rests_on
from mpcompile.optim.members import Member
from mpcompile.optim.rests_on import Alike, Fact, Fingerprint, Gradients, State, same

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


# -- which parameters have a gradient --------------------------------------------------------------


def with_gradients() -> torch.optim.Optimizer:
    shapes = ((3, 2), (3, 2), (4,), (0,), (1,))
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    for p in (*params[:2], params[3], params[4]):  # the third has no gradient
        p.grad = torch.ones_like(p)
    return torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)


def narrow(p: Any) -> None:
    p.grad = None
    p.grad_dtype = torch.float16
    p.grad = torch.ones(3, 2).half()


def get_elements(p: Any) -> None:
    p.grad = None
    p.data = torch.ones(2)
    p.grad = torch.ones(2)


def replace_by_an_equal_one(params: list[Any]) -> None:
    one, params[2] = params[2], nn.Parameter(torch.ones(1))
    params[2].grad = one.grad


# What changes in the lists of parameters of the two groups.
PATTERNS: dict[str, Callable[[list[Any], list[Any]], object]] = {
    "one lost": lambda a, b: setattr(a[0], "grad", None),
    "one more": lambda a, b: setattr(b[0], "grad", torch.ones(4)),
    "transposed": lambda a, b: setattr(a[0], "grad", torch.ones(2, 3).t()),
    "narrow": lambda a, b: narrow(a[0]),
    "sparse": lambda a, b: setattr(a[0], "grad", torch.ones(3, 2).to_sparse()),
    "an equal one": lambda a, b: replace_by_an_equal_one(b),
    "swapped": lambda a, b: a.reverse(),
    "in the other group": lambda a, b: b.insert(0, a.pop()),
    "has elements": lambda a, b: get_elements(b[1]),
}


@pytest.mark.parametrize("name", [*PATTERNS, "one more group"])
def test_another_pattern_of_gradients_is_noticed(name: str) -> None:
    own = with_gradients()
    pattern = Gradients(own)
    assert pattern.holds(own)
    if name in PATTERNS:
        PATTERNS[name](*(group["params"] for group in own.param_groups))
    else:
        own.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert not pattern.holds(own)


def test_a_pattern_holds_for_new_gradients_stored_alike() -> None:
    """That of a parameter without elements does not count."""
    own = with_gradients()
    empty = own.param_groups[1]["params"][1]
    empty.grad = torch.ones(0).to_sparse()
    pattern = Gradients(own)
    empty.grad = torch.ones(0)
    assert pattern.holds(own)
    for p in (p for group in own.param_groups for p in group["params"] if p.grad is not None):
        p.grad = p.grad.clone() + 1
    assert pattern.holds(own)


@pytest.mark.slow("trains with several optimizers")
def test_a_parameter_that_has_become_smaller_is_no_longer_taken_for_the_larger_one() -> None:
    """It lies at the same address, with the same strides. Its moments are too large for it now, so
    that torch's own step is an error as well.
    """
    p = nn.Parameter(torch.ones(6, 2))
    ours = MPOptimizer(torch.optim.AdamW([p], lr=0.1))
    p.grad = torch.ones(6, 2)
    ours.step()
    p.grad = None
    p.data = p.data[:4]
    p.grad = torch.ones(4, 2)
    with pytest.raises(RuntimeError, match="size of tensor"):
        ours.step()


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
