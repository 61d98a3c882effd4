"""guard_constants: what the low dtype can't hold is computed in FP32, as far as it reaches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import leaf
from expecttest import assert_expected_inline
from graphs import Stage

from mpcompile.passes.graph.guard_constants import guard_constants
from mpcompile.rules.policy import Policy, Precision


def pinned(stage: Stage) -> dict[str, str]:
    """The nodes this pass pinned, and why."""
    return {
        node.name: stage.mark(node.name).reason
        for node in stage.gm.graph.nodes
        if "mp" in node.meta and stage.mark(node.name).rule == "guard"
    }


def test_applies_and_reaches_as_far_as_the_value() -> None:
    """From the mask to the softmax, which has FP32 arithmetic of its own, and no further."""

    def program(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = (q @ q.t()).masked_fill(mask, torch.finfo(q.dtype).min)
        return F.dropout((scores * 2).softmax(-1), 0.0) @ q

    stage = Stage(guard_constants, program, leaf(4, 8), torch.ones(4, 4).bool())
    assert not stage.run()  # a deciding pass
    assert pinned(stage) == {
        "masked_fill": "f16 can't hold the constant -3.40282e+38",
        "mul": "an input is wide: constant -3.40282e+38",
    }
    stage.run_twice()


def scalar(x: torch.Tensor) -> Any:
    return F.relu(x.relu() + 1e-8)


def named_argument(x: torch.Tensor) -> Any:
    return x.relu().clamp(max=1e6)


def filled(x: torch.Tensor) -> Any:
    return torch.where(x > 0, x.relu(), torch.full_like(x, -1e9))


def constant_tensor(x: torch.Tensor) -> Any:
    return x.relu() * torch.tensor([1.0, 1e6])


def exponential(x: torch.Tensor) -> Any:
    return F.relu(x.exp())


def positions(x: torch.Tensor) -> Any:
    return x.relu() + torch.arange(4000, 4002, dtype=torch.float32)


def few_positions(x: torch.Tensor) -> Any:
    return x.relu() + torch.arange(2, dtype=torch.float32)


def two_positions(x: torch.Tensor) -> Any:
    a, b = torch.meshgrid(torch.arange(3.0), torch.arange(2.0), indexing="ij")
    row, column = torch.stack([a, b], -1).unbind(-1)
    return x.relu() + row, x.relu() * column


def whole_numbers(x: torch.Tensor) -> Any:
    return x.relu() - x.floor(), torch.div(x, 2, rounding_mode="floor").relu(), (x / 2).relu()


def integers_beside_floats(x: torch.Tensor) -> Any:
    return x.relu() + torch.arange(2), x.relu().index_select(0, torch.tensor([0, 1]))


def upper_bound(x: torch.Tensor) -> Any:
    return 1 - x.sigmoid().clamp(max=1 - 1e-4)


def lower_bound(x: torch.Tensor) -> Any:
    return x.tanh().clamp(-1 + 1e-4, 0.5).relu()


def bounds_that_meet(x: torch.Tensor) -> Any:
    return x.relu().clamp(0.5, 0.50001)


def bound_in_a_tensor(x: torch.Tensor) -> Any:
    return torch.minimum(x.sigmoid(), torch.tensor(1 - 1e-4))


def nothing_beside_one(x: torch.Tensor) -> Any:
    return 1 - (x.sigmoid() - 1e-4)


def a_view_that_is_returned(x: torch.Tensor) -> Any:
    y = x.relu() + torch.arange(2.0)
    z = y.view(-1)
    return y, z, z * 2


def integers(x: torch.Tensor) -> Any:
    return x.relu() * torch.arange(2).float()


def harmless_numbers(x: torch.Tensor) -> Any:
    return (x.relu() * 0.125 + 60000.0 - float("inf")) * 0.0


def infinite_mask(x: torch.Tensor) -> Any:
    return x.relu().masked_fill(x > 0, float("-inf"))


def harmless_constant(x: torch.Tensor) -> Any:
    return x.relu() * torch.tensor([1.0, -2.5])


def bounded(x: torch.Tensor) -> Any:
    return x.exp().sigmoid().relu()


@pytest.mark.parametrize(
    ("program", "reached"),
    [
        (scalar, {"add", "relu_1"}),
        (named_argument, {"clamp"}),
        (filled, {"where"}),
        (constant_tensor, {"detach_", "mul"}),
        (exponential, {"relu"}),
        (positions, {"add"}),
        (few_positions, {"add"}),
        (two_positions, {
            "meshgrid", "getitem", "getitem_1", "stack", "unbind", "getitem_2", "getitem_3", "add",
            "mul",
        }),
        (whole_numbers, {"sub", "relu_1"}),
        (integers_beside_floats, {"add"}),
        (upper_bound, {"sigmoid", "clamp", "rsub"}),
        (lower_bound, {"tanh", "clamp", "relu"}),
        (bounds_that_meet, {"relu", "clamp"}),
        (bound_in_a_tensor, {"detach_", "minimum"}),
        (nothing_beside_one, {"sub", "rsub"}),
        (a_view_that_is_returned, {"add", "mul"}),
        (integers, {"mul"}),
        (harmless_numbers, set()),
        (infinite_mask, set()),
        (harmless_constant, set()),
        (bounded, {"sigmoid"}),  # pinned itself; what reads it is safe
    ],
)  # fmt: skip
def test_origins(program: Any, reached: set[str]) -> None:
    stage = Stage(guard_constants, program, leaf(3, 2))
    stage.run()
    assert pinned(stage).keys() == reached


def test_bf16_holds_the_range_but_not_the_positions() -> None:
    stage = Stage(guard_constants, constant_tensor, leaf(3, 2), low=torch.bfloat16)
    stage.run()
    assert pinned(stage) == {}

    def far_apart(x: torch.Tensor) -> torch.Tensor:
        return x.relu() + torch.arange(256.0, 259.0)

    far = Stage(guard_constants, far_apart, leaf(2, 3), low=torch.bfloat16)
    far.run()
    assert pinned(far).keys() == {"add"}


def test_a_product_takes_a_wide_operand_but_no_inexact_one() -> None:
    def program(x: torch.Tensor, w: torch.Tensor, n: torch.Tensor) -> Any:
        return F.linear(x.exp(), w), F.linear(n.float(), w)

    stage = Stage(guard_constants, program, leaf(3, 4), leaf(5, 4), torch.ones(3, 4).long())
    stage.run()
    assert stage.mark("linear").precision is Precision.LOW
    assert stage.mark("linear_1").reason == (
        "an input is wide: integers that the low dtype can't tell apart"
    )


@pytest.mark.parametrize(("level", "reached"), [("O1", set()), ("O2", {"add"})])
def test_data_of_unknown_range_at_o2(level: str, reached: set[str]) -> None:
    def program(x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w) + mask

    inputs = leaf(3, 4), leaf(5, 4), torch.zeros(5)
    stage = Stage(guard_constants, program, *inputs, level=level, dynamic=True)
    stage.run()
    assert pinned(stage).keys() == reached


def test_the_users_word_is_not_overruled() -> None:
    stage = Stage(guard_constants, scalar, leaf(3, 2), policy=Policy(low=["add"]))
    stage.run()
    assert_expected_inline(
        stage.marks,
        """\
relu: FOLLOW [table]
add: LOW [policy]
relu_1: FOLLOW [table]
""",
    )
