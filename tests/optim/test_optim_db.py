"""MPOptimizer against torch's own list of optimizers: every class, every configuration.

Twenty steps from the same gradients, two of them not finite. What must come out is what the eager
optimizer makes of the eighteen others. The first has a learning rate of zero, as a warmup does, and
some elements never see a gradient.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from optimizer_cases import RICHEST, Case, cases
from torch import nn
from versions import before

from mpcompile import MPCompileError, MPOptimizer
from mpcompile.optim import updates

REST = pytest.mark.sweep("all of torch's optimizer table")

STEPS, BAD = 20, {7: float("inf"), 12: float("nan")}
# Muon iterates in BF16, where one rounding is 2**-8: a step taken in another order differs by that.
TOLERANCE = {"Muon": {"rtol": 2e-2, "atol": 2e-3}}


ALL = [pytest.param(case, id=name) for name, case in cases()]
SAMPLED = [
    pytest.param(case, id=name, marks=() if name in RICHEST.values() else REST)
    for name, case in cases()
]


def parameters(case: Case) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in case.shapes]


def everything(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter]
) -> list[dict[str, Any]]:
    """Each parameter with its state."""
    return [{"param": p.detach(), **optimizer.state[p]} for p in params]


def copied(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v.clone() if torch.is_tensor(v) else v for k, v in e.items()} for e in entries]


def set_lr(optimizer: torch.optim.Optimizer, value: float) -> float:
    """Set the learning rate; return what it was."""
    (group,) = optimizer.param_groups
    before = float(group["lr"])
    if torch.is_tensor(group["lr"]):
        group["lr"].fill_(value)
    else:
        group["lr"] = value
    return before


def check(case: Case, emit: str) -> None:
    mine, theirs = parameters(case), parameters(case)
    reference = case.optimizer(theirs)
    optimizer = MPOptimizer(case.optimizer(mine), emit=emit)
    rates = [set_lr(o, 0.0) for o in (optimizer, reference)]
    for step in range(STEPS):
        if step == 1:
            for o, rate in zip((optimizer, reference), rates, strict=True):
                set_lr(o, rate)
        gradients = [torch.randn_like(p) for p in mine]
        gradients[0][0] = 0.0
        for p, g in zip(mine, gradients, strict=True):
            p.grad = g
        if step in BAD:
            before = copied(everything(optimizer, mine))
            assert set(before[0]) > {"param"} or not reference.state, "there is state to keep"
            gradients[step % len(mine)].view(-1)[0] = BAD[step]
            optimizer.step()
            assert optimizer.skipped
            torch.testing.assert_close(everything(optimizer, mine), before, rtol=0, atol=0)
            continue
        for p, g in zip(theirs, gradients, strict=True):
            p.grad = g.clone()
        reference.step()
        optimizer.step()
        assert not optimizer.skipped
    assert (optimizer.skipped_steps, optimizer.compilations) == (len(BAD), 1)
    tolerance = TOLERANCE.get(case.name, {"rtol": 1e-5, "atol": 1e-6})
    torch.testing.assert_close(everything(optimizer, mine), everything(reference, theirs),
                               **tolerance)  # fmt: skip


@pytest.mark.slow_rows("trains with several optimizers")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ALL)
def test_operator_by_operator(case: Case) -> None:
    check(case, "eager")


@pytest.mark.parametrize("case", SAMPLED)
def test_multi_tensor(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs that a GPU gets, run here."""
    if case.name == "Adafactor" and before("2.13"):
        pytest.skip("before torch 2.13 its multi-tensor form can't be traced: it asks for a dtype")
    monkeypatch.setattr(updates, "capabilities", lambda device: SimpleNamespace(multi_tensor=True))
    check(case, "eager")


@pytest.mark.slow("trains with several optimizers")
@pytest.mark.sampled(7)
@pytest.mark.parametrize("case", SAMPLED)
def test_compiled(case: Case) -> None:
    check(case, "inductor")


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for name, case in cases(refused=True)]
)
def test_refused(case: Case) -> None:
    with pytest.raises(MPCompileError, match=rf"MPOptimizer: {case.name}.*use \w+ as it is"):
        MPOptimizer(case.optimizer([nn.Parameter(torch.randn(3, 4))]))
