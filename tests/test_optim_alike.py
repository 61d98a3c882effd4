"""What a step asks of all tensors at once is answered as one by one."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import nn

from mpcompile.optim.alike import DTYPE_AND_LAYOUT, SHAPE, STRIDE, Alike
from mpcompile.optim.assumptions import _Snapshot

FACTS = {"dtype and layout": DTYPE_AND_LAYOUT, "shape": SHAPE, "stride": STRIDE}


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
    alike = Alike(held, DTYPE_AND_LAYOUT, SHAPE, STRIDE)
    with torch.autocast("cpu"), torch.inference_mode():
        assert alike.holds(held)
    with torch.no_grad():
        assert alike.holds(held)


def test_another_number_of_tensors_is_not_alike() -> None:
    held = tensors()
    alike = Alike(held, SHAPE)
    assert not alike.holds(held[:-1])
    assert not alike.holds([*held, held[0]])
    assert not alike.holds([])
    assert Alike([], SHAPE).holds([])
    assert not Alike([], SHAPE).holds(held)


# -- a state ---------------------------------------------------------------------------------------


def state() -> dict[torch.Tensor, dict[str, object]]:
    return {p: {"step": 1.0, "moment": torch.ones(2)} for p in (torch.ones(2), torch.zeros(2))}


@pytest.mark.parametrize(
    "change",
    [
        lambda s, p: s.pop(p),
        lambda s, p: operator.setitem(s, p, dict(s[p])),
        lambda s, p: operator.setitem(s, torch.ones(2), {}),
        lambda s, p: operator.setitem(s[p], "moment", torch.ones(2)),
        lambda s, p: operator.setitem(s[p], "step", float("2")),
        lambda s, p: operator.setitem(s[p], "more", None),
        lambda s, p: s[p].pop("step"),
        lambda s, p: operator.setitem(s[p], "other", s[p].pop("moment")),
    ],
    ids=["gone", "other entries", "more", "tensor", "number", "another", "lost", "renamed"],
)
def test_a_snapshot_tells_other_objects(change: Callable[..., object]) -> None:
    now = state()
    own = [*now.values()]
    snapshot = _Snapshot(now, own)
    assert snapshot.holds(now)
    change(now, [*now][-1])
    assert not snapshot.holds(now)


def test_a_snapshot_is_of_the_entries_that_matter() -> None:
    now = state()
    first, last = now
    snapshot = _Snapshot(now, [now[first]])
    now[last]["moment"] = torch.ones(2)
    assert snapshot.holds(now)
