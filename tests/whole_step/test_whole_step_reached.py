"""What stands in the place of a method of Dynamo's, and is not reached, leaves no wrong numbers.

Each test moves one replacement aside, as a release would that calls something else, and sees that
the step is not compiled as a whole, or that a function is refused.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from mpcompile import MPCompileError, MPCompileWarning, mpcompile
from mpcompile.capture import rebound
from mpcompile.torch_inside import replace
from mpcompile.torch_inside.private_names import MissingInTorch
from mpcompile.whole_step import tracing

pytestmark = pytest.mark.inside

Step = Callable[[torch.Tensor], torch.Tensor]
Make = Callable[[nn.Module, torch.optim.Optimizer], Step]


def making(*, reads: bool = False, sets: bool = False) -> Make:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            if reads:
                loss = loss * (2 * optimizer.param_groups[0]["lr"])
            loss.backward()
            if sets:
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] * 0.5
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    return make


plain, reads_settings, sets_rate = making(), making(reads=True), making(sets=True)


def agree(make: Make) -> str | None:
    """Why three steps in FP32 can't be compiled as a whole; they agree with those in FP64."""
    torch.manual_seed(0)
    model, data = nn.Linear(4, 3), torch.randn(3, 8, 4)
    true = copy.deepcopy(model).double()
    step = mpcompile(make(model, torch.optim.SGD(model.parameters(), lr=0.1)), level="O0",
                     dtype=torch.bfloat16, emit="aot_eager")  # fmt: skip
    wanted = make(true, torch.optim.SGD(true.parameters(), lr=0.1))
    for x in data:
        torch.testing.assert_close(step(x).double(), wanted(x.double()), rtol=1e-5, atol=1e-6)
    for mine, p in zip(model.parameters(), true.parameters(), strict=True):
        torch.testing.assert_close(mine.double(), p, rtol=1e-5, atol=1e-6)
    return step.left


def moved_aside(monkeypatch: pytest.MonkeyPatch, find: str, name: str) -> None:
    """Have Dynamo call its own function where `find(cls, name, ours)` would put ours."""
    own = getattr(replace, find)

    def aside(cls: Any, attribute: str, ours: Any) -> replace.Replacement:
        found: replace.Replacement = own(cls, attribute, ours)
        if attribute == name:
            monkeypatch.setattr(found, "_counted", lambda theirs: theirs)
        return found

    monkeypatch.setattr(tracing, find, aside)


@pytest.mark.parametrize("make", [plain, reads_settings])
def test_all_is_reached(make: Make) -> None:
    assert agree(make) is None


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@pytest.mark.parametrize(
    ("make", "find", "name", "reason"),
    [
        (plain, "calls_of", "backward", "its backward() in a way that is not known"),
        (reads_settings, "reads_of", "param_groups", "param_groups in a way"),
        (plain, "method", tracing.dynamo.CHECK_OUTPUTS[0], "consumed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_replacement_that_is_not_reached(
    monkeypatch: pytest.MonkeyPatch, make: Make, find: str, name: str, reason: str
) -> None:
    moved_aside(monkeypatch, find, name)
    with pytest.warns(MPCompileWarning, match="runs in pieces"):
        left = agree(make)
    assert reason in left


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@pytest.mark.parametrize("find", [None, "calls_of"])
def test_a_rate_that_is_set_is_seen_without_any(
    monkeypatch: pytest.MonkeyPatch, find: str | None
) -> None:
    if find is not None:
        moved_aside(monkeypatch, find, "backward")
    with pytest.warns(MPCompileWarning, match="changes settings or state of an optimizer"):
        agree(sets_rate)


def test_optimizers_are_as_they_were_where_a_place_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing.dynamo, "CHECK_OUTPUTS", ("check_that_never_was",))
    before = torch_as_it_is()
    with pytest.warns(MPCompileWarning, match="OutputGraph.check_that_never_was is not there"):
        agree(plain)
    assert torch_as_it_is() == before


def test_nothing_stays_in_torch_after_a_trace() -> None:
    before = torch_as_it_is()
    assert agree(reads_settings) is None
    assert torch_as_it_is() == before


def test_optimizers_are_as_they_are_while_a_step_is_traced() -> None:
    before = torch_as_it_is()[0]
    with tracing.traceable_optimizers():
        assert torch_as_it_is()[0] == before


def torch_as_it_is() -> list[dict[str, Any]]:
    """What a trace might leave its own things in."""
    optimizers = [dict(vars(cls)) for cls in (torch.optim.Optimizer, torch.optim.SGD)]
    names = ("TensorVariable", "OptimizerVariable", "OutputGraph", "SideEffects")
    dynamos = [getattr(tracing.names, name) for name in names]
    tables = [dict(vars(c).get("tp_getset", {})) for c in dynamos]
    return [{"optimizers": optimizers}, *(dict(vars(c)) for c in dynamos), *tables]


# -- a parameter that is written under its name ----------------------------------------------------


def train_by_hand(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        p -= 0.1 * p.grad
        p.grad = None
    return (p * x).sum()


def compiled_by_hand() -> torch.Tensor:
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.ones(3)
    step = mpcompile(train_by_hand, dtype=torch.bfloat16, emit="aot_eager", strict=True)
    step(p, torch.ones(3))
    assert p.grad is None
    return p.detach()


def test_a_gradient_is_set_through_ours() -> None:
    torch.testing.assert_close(compiled_by_hand(), torch.full((3,), 0.9))


def test_a_gradient_that_was_set_is_read_back() -> None:
    """As set, and the parameter keeps it."""

    def program(p: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            p -= 1
            p.grad = p.grad + 1
            return p.grad * 2

    p = torch.zeros(3, requires_grad=True)
    p.grad = torch.zeros(3)
    step = mpcompile(program, dtype=torch.bfloat16, emit="aot_eager", strict=True)
    torch.testing.assert_close(step(p), torch.full((3,), 2.0))
    torch.testing.assert_close(p.grad, torch.ones(3))


@pytest.fixture
def aside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has Dynamo call its own function in the place of one of ours."""
    monkeypatch.setattr(request.param, "_counted", lambda theirs: theirs)
    request.param.reached = 0


@pytest.mark.parametrize("aside", [rebound._READING], indirect=True, ids=["read"])
def test_a_whole_step_that_reads_gradients_in_another_way(aside: None) -> None:
    with pytest.warns(MPCompileWarning, match="runs in pieces.*Dynamo reads gradients in a new"):
        agree(plain)


@pytest.mark.parametrize("aside", [rebound._READING], indirect=True, ids=["read"])
def test_a_gradient_that_is_read_in_another_way_is_refused(aside: None) -> None:
    with pytest.raises(MPCompileError, match="Dynamo reads gradients in a new way"):
        compiled_by_hand()


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This torch is newer than any that was tested."""
    monkeypatch.setattr(rebound, "is_untested", lambda version: True)
    rebound._is_followed.cache_clear()
    yield
    rebound._is_followed.cache_clear()


def test_an_untested_release_that_follows_gradients_is_taken(untested: None) -> None:
    compiled_by_hand()


@pytest.mark.parametrize(
    "aside", [rebound._STORING, rebound._READING], indirect=True, ids=["set", "read"]
)
def test_an_untested_release_that_loses_gradients_is_refused(untested: None, aside: None) -> None:
    with pytest.raises(MPCompileError, match="sets or reads gradients in a new way"):
        compiled_by_hand()


def test_functions_are_refused_where_no_gradient_can_be_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rebound, "_missing", lambda: MissingInTorch("torch 3.0 has none"))
    with pytest.raises(MPCompileError, match=r"functions can't be compiled: torch 3\.0 has none"):
        compiled_by_hand()
