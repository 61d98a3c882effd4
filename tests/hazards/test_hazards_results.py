"""What a program returns, and programs with little in them."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, SETTINGS, assert_near, check, fallback_reason, leaf, weighted_sum
from module_of import module_of
from torch import nn

from mpcompile import Policy, mpcompile


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    logits: torch.Tensor
    name: str = "result"


def leftovers(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    """Results of several kinds of node: a sort's values and indices, a split's parts."""
    values, order = h.sort(-1)
    a, b = h.chunk(2, -1)
    return values, order.sort(-1)[0], a, b.contiguous()


RETURNS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "its input": lambda h, x, w: (x, h),
    "a view of its input": lambda h, x, w: (x[2:].t(), w.view(-1), h),
    "twice": lambda h, x, w: (h, h, h.view(-1), [h, h + 1]),
    "no tensors": lambda h, x, w: (
        None, 3, "text", h.shape[0], h, 2.5, True, h.dtype == torch.float32, None
    ),
    "a dict": lambda h, x, w: {
        "h": h, "inner": {"loss": h.mean(), "none": None}, "best": h.argmax(-1)
    },
    "detached": lambda h, x, w: (h.detach(), h, h.detach().mean(), h > 0),
    "a constant": lambda h, x, w: (torch.ones(3), torch.arange(5), h),
    "leftovers": leftovers,
}  # fmt: skip


@SETTINGS
@pytest.mark.parametrize("case", RETURNS)
def test_returns(case: str, level: str, emit: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        return RETURNS[case](F.linear(x, w), x, w)

    check(program, leaf(8, 16), leaf(16, 16), level=level, emit=emit, low=["linear"])


def test_input_comes_back_as_itself() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        return x, F.linear(x, w)

    x, w = leaf(8, 16), leaf(16, 16)
    fast = mpcompile(program, dtype=torch.float16, emit="aot_eager", strict=True)
    assert fast(x, w)[0] is x


@LEVELS
def test_dataclass_result(level: str) -> None:
    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> Result:
        logits = m.linear(x)
        return Result(F.cross_entropy(logits, y), logits)

    model = module_of(forward, linear=nn.Linear(16, 4))
    mpcompile(model, dtype=torch.float16, level=level, emit="eager", strict=True)
    result = model(torch.randn(8, 16), torch.randint(4, (8,)))
    assert isinstance(result, Result)
    assert (result.name, result.loss.dtype) == ("result", torch.float32)
    assert result.logits.shape == (8, 4)
    result.loss.backward()
    assert model.linear.weight.grad.norm() > 0


@SETTINGS
def test_result_may_be_written_by_the_caller(level: str, emit: str) -> None:
    """Between the graphs of a broken program, say."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w)

    x, w = torch.randn(8, 16), leaf(16, 16)
    fast = mpcompile(program, dtype=torch.float16, emit=emit, level=level, strict=True)
    grads = []
    for run in (program, fast):
        h = run(x, w)
        h += 1
        h[0].zero_()
        grads.append(torch.autograd.grad((h * h).mean(), w)[0])
    assert_near(grads[1], grads[0], "gradient", 1e-2)


def whole_and_view(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = F.linear(x, w) * 0.5
    return h, h.view(-1)


def view_and_whole(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = F.gelu(F.linear(x, w)) + x
    return h.t(), h


SHARING: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "whole and view": whole_and_view,
    "whole and row": lambda x, w: (h := F.linear(x, w), h[0]),
    "view and whole": view_and_whole,
    "whole and detached": lambda x, w: (h := F.linear(x, w), h.detach()),
    "view of the input": lambda x, w: (F.linear(x.detach().clone(), w), x.view(-1)),
    "whole and overlapping windows": lambda x, w: (h := F.linear(x, w), h.unfold(1, 2, 1)),
}


def used(written: int | None, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """A loss of both results; one of them is written to before."""
    if written is not None:
        (first, second)[written].mul_(2)
    one, other = (second, first) if written == 1 else (first, second)
    return weighted_sum(one.sin()) + weighted_sum(other * 3)


@SETTINGS
@pytest.mark.parametrize("scale", ["dynamic", 1024.0, "none"])
@pytest.mark.parametrize(
    ("name", "written"),
    [
        *itertools.product([*SHARING][:-1], (0, 1)),
        ("whole and overlapping windows", None),
        ("whole and overlapping windows", 0),
    ],
)
def test_results_that_share_memory(
    name: str, written: int | None, scale: Any, level: str, emit: str
) -> None:
    """What the caller writes to one is in the other, and in its history."""
    program = SHARING[name]
    fast = mpcompile(
        program, level=level, emit=emit, loss_scale=scale, dtype=torch.float16, strict=True
    )
    x, w = leaf(8, 16), leaf(16, 16)
    found = []
    for run in (program, fast, fast):  # the first backward finds the scale, the second has it
        inner = x * 1  # no leaf: it may be written
        loss = used(written, *run(inner, w)) + weighted_sum(inner)
        found.append((loss, *torch.autograd.grad(loss, (x, w), allow_unused=True)))
    for actual in found[1:]:
        for what, a, b in zip(("loss", "x", "w"), actual, found[0], strict=True):
            assert_near(a, b, what, 1e-2)


def test_a_policy_that_would_part_results_is_refused() -> None:
    """The view low by the user's word, its memory FP32 for the caller: two places."""
    policy = Policy(nodes={"view": "low"})
    reason = fallback_reason(whole_and_view, leaf(8, 16), leaf(16, 16), policy=policy)
    assert "no longer lies in the memory of" in reason


SMALL: dict[str, tuple[Any, list[torch.Tensor], list[str]]] = {
    "a module without parameters": (
        module_of(lambda m, x, y: x @ y), [leaf(8, 16), leaf(16, 8)], ["matmul"]
    ),
    "nothing is float": (
        lambda x, y: (x + y.sum(), x > 2, x.bool() & (y[0] > 0)),
        [torch.randint(9, (8, 4)), torch.randint(9, (4,))], [],
    ),
    "no tensor comes in": (lambda: torch.ones(3, 4) @ torch.ones(4, 2), [], ["matmul"]),
    "nothing to compute": (nn.Identity(), [leaf(3)], []),
}  # fmt: skip
"""Programs with little in them, their inputs, and what of them runs low."""


@pytest.mark.parametrize("name", SMALL)
def test_programs_with_little_in_them(name: str) -> None:
    program, inputs, low = SMALL[name]
    check(program, *inputs, low=low)


@SETTINGS
def test_an_operator_that_gives_back_its_operand_under_no_grad(level: str, emit: str) -> None:
    """What comes after the block still reads a value with a history."""

    def program(w: torch.Tensor) -> torch.Tensor:
        row = w.diagonal()
        with torch.no_grad():
            F.smooth_l1_loss(row, row.expand_as(row), reduction="none")
            row.contiguous()
        return torch.mv(w, row)

    check(program, leaf(8, 8), level=level, emit=emit, low=["mv"], loss_scale=1024.0)


@SETTINGS
@pytest.mark.parametrize("loss_scale", [1024.0, "none"])
def test_a_view_made_under_no_grad(level: str, emit: str, loss_scale: float | str) -> None:
    """Of what autograd tracks it is tracked, though no gradient goes through it."""

    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        h = F.linear(x, w)
        with torch.no_grad():
            return h.view(-1)

    fast = mpcompile(
        program, dtype=torch.float16, level=level, emit=emit, loss_scale=loss_scale, strict=True
    )
    x, w = leaf(8, 16), leaf(16, 16)
    assert fast(x, w).requires_grad == program(x, w).requires_grad
    torch.testing.assert_close(fast(x, w), program(x, w), rtol=2e-2, atol=2e-2)


@SETTINGS
def test_operators_whose_names_end_as_those_that_write(level: str, emit: str) -> None:
    """`a & b` is `__and__`: it writes nothing, and its result is not its operand."""

    def program(m: torch.Tensor, n: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        return m & n, m | n, m ^ n, F.linear(x, w)

    masks = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    check(program, *masks, leaf(4, 8), leaf(8, 8), level=level, emit=emit, low=["linear"])
