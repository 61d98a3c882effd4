"""guard_constants: what the low dtype can't hold is computed in FP32, as far as it reaches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import COMBINED, check, leaf
from graphs import Stage, ran

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


def constant_tensor(x: torch.Tensor) -> Any:
    return x.relu() * torch.tensor([1.0, 1e6])


def two_positions(x: torch.Tensor) -> Any:
    a, b = torch.meshgrid(torch.arange(3.0), torch.arange(2.0), indexing="ij")
    row, column = torch.stack([a, b], -1).unbind(-1)
    return x.relu() + row, x.relu() * column


def a_view_that_is_returned(x: torch.Tensor) -> Any:
    y = x.relu() + torch.arange(2.0)
    z = y.view(-1)
    return y, z, z * 2


PAIR = "meshgrid getitem getitem_1 stack unbind getitem_2 getitem_3 add mul"
ORIGINS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "scalar": (scalar, "add relu_1"),
    "named_argument": (lambda x: x.relu().clamp(max=1e6), "clamp"),
    "filled": (lambda x: torch.where(x > 0, x.relu(), torch.full_like(x, -1e9)), "where"),
    "constant_tensor": (constant_tensor, "detach_ mul"),
    "exponential": (lambda x: F.relu(x.exp()), "relu"),
    "positions": (lambda x: x.relu() + torch.arange(4000, 4002, dtype=torch.float32), "add"),
    "few_positions": (lambda x: x.relu() + torch.arange(2, dtype=torch.float32), "add"),
    "two_positions": (two_positions, PAIR),
    "whole_numbers": (
        lambda x: (x.relu() - x.floor(), torch.div(x, 2, rounding_mode="floor").relu(),
                   (x / 2).relu()),
        "sub relu_1",
    ),
    "integers_beside_floats": (
        lambda x: (x.relu() + torch.arange(2), x.relu().index_select(0, torch.tensor([0, 1]))),
        "add",
    ),
    "upper_bound": (lambda x: 1 - x.sigmoid().clamp(max=1 - 1e-4), "sigmoid clamp rsub"),
    "lower_bound": (lambda x: x.tanh().clamp(-1 + 1e-4, 0.5).relu(), "tanh clamp relu"),
    "bounds_that_meet": (lambda x: x.relu().clamp(0.5, 0.50001), "relu clamp"),
    "bound_in_a_tensor": (
        lambda x: torch.minimum(x.sigmoid(), torch.tensor(1 - 1e-4)), "detach_ minimum"
    ),
    "nothing_beside_one": (lambda x: 1 - (x.sigmoid() - 1e-4), "sub rsub"),
    "a_view_that_is_returned": (a_view_that_is_returned, "add mul"),
    "integers": (lambda x: x.relu() * torch.arange(2).float(), "mul"),
    "harmless_numbers": (lambda x: (x.relu() * 0.125 + 60000.0 - float("inf")) * 0.0, ""),
    "infinite_mask": (lambda x: x.relu().masked_fill(x > 0, float("-inf")), ""),
    "harmless_constant": (lambda x: x.relu() * torch.tensor([1.0, -2.5]), ""),
    "bounded": (lambda x: x.exp().sigmoid().relu(), "sigmoid"),  # what reads it is safe
}  # fmt: skip


@pytest.mark.parametrize("case", ORIGINS)
def test_origins(case: str) -> None:
    program, reached = ORIGINS[case]
    stage = ran(guard_constants, program, leaf(3, 2))
    assert pinned(stage).keys() == set(reached.split())


def test_bf16_holds_the_range_but_not_the_positions() -> None:
    stage = ran(guard_constants, constant_tensor, leaf(3, 2), low=torch.bfloat16)
    assert pinned(stage) == {}

    def far_apart(x: torch.Tensor) -> torch.Tensor:
        return x.relu() + torch.arange(256.0, 259.0)

    far = ran(guard_constants, far_apart, leaf(2, 3), low=torch.bfloat16)
    assert pinned(far).keys() == {"add"}


def test_a_product_takes_a_wide_operand_but_no_inexact_one() -> None:
    def program(x: torch.Tensor, w: torch.Tensor, n: torch.Tensor) -> Any:
        return F.linear(x.exp(), w), F.linear(n.float(), w)

    stage = ran(guard_constants, program, leaf(3, 4), leaf(5, 4), torch.ones(3, 4).long())
    assert stage.mark("linear").precision is Precision.LOW
    assert stage.mark("linear_1").reason == (
        "an input is wide: integers that the low dtype can't tell apart"
    )


@pytest.mark.parametrize(("level", "reached"), [("O1", set()), ("O2", {"add"})])
def test_data_of_unknown_range_at_o2(level: str, reached: set[str]) -> None:
    def program(x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w) + mask

    inputs = leaf(3, 4), leaf(5, 4), torch.zeros(5)
    stage = ran(guard_constants, program, *inputs, level=level, dynamic=True)
    assert pinned(stage).keys() == reached


def test_the_users_word_is_not_overruled() -> None:
    stage = ran(guard_constants, scalar, leaf(3, 2), policy=Policy(low=["add"]))
    stage.expect_marks("""\
relu: FOLLOW [table]
add: LOW [policy]
relu_1: FOLLOW [table]
""")


# -- products after integers ---------------------------------------------------------------------


def sparsemax(z: torch.Tensor) -> torch.Tensor:
    ranked = z.sort(-1, descending=True)[0]
    beyond = ranked.cumsum(-1) - 1
    k = (torch.arange(1, z.shape[-1] + 1, dtype=z.dtype) * ranked > beyond).sum(-1, keepdim=True)
    return (z - beyond.gather(-1, k - 1) / k.to(z.dtype)).clamp(min=0)


BEHIND_INTEGERS: dict[str, Callable[..., torch.Tensor]] = {
    "a mask": lambda h, n: h * (n > 2).to(h.dtype),
    "a mask that comes in": lambda h, n: h * n.to(h.dtype),
    "without a conversion": lambda h, n: h * n,
    "where it is zero": lambda h, n: h * (1.0 - n.float()),
    "an additive mask": lambda h, n: h + (1.0 - (n > 2).float()) * -10.0,
    "a length": lambda h, n: h / n.sum(1, keepdim=True).float(),
    "a clamped length": lambda h, n: h.cumsum(0) / n.sum(1, keepdim=True).clamp(min=1).float(),
    "a degree": lambda h, n: h * n.sum(1, keepdim=True).float().rsqrt(),
    "a share of the time": lambda h, n: h + n.float() / 1000,
    "a one-hot": lambda h, n: F.one_hot(n[:, 0], 4).float(),
    "beside a one-hot": lambda h, n: torch.cat([h[:, 2:], F.one_hot(n[:, 0] % 2, 2).float()], 1),
    "times a one-hot": lambda h, n: h * F.one_hot(n[:, 0], 4).type_as(h),
    "one of a diagonal": lambda h, n: torch.eye(4, dtype=torch.long)[n[:, 0]].float() + h,
    "a triangle": lambda h, n: h * torch.ones(4, 4, dtype=torch.long).tril()[:3].to(h.dtype),
    "a count of matches": lambda h, n: h / (n[:, None] == n[None]).sum(1).float(),
    "ranks of a sort": lambda h, n: h / (1 + h.argsort(-1)).float(),
    "an in-place mask": lambda h, n: h.clone().mul_(n.to(h.dtype)),
    "sparsemax": lambda h, n: sparsemax(h) * h,
}


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_products_after_a_large_additive_mask_are_low(low: torch.dtype, level: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w) + (1.0 - (n > 2).float()) * -1e4
        return F.linear(F.linear(h, w).relu(), w)

    given = leaf(3, 4), leaf(4, 4), torch.arange(12).view(3, 4) % 4
    stage = ran(guard_constants, program, *given, low=low, level=level)
    products = [n.name for n in stage.gm.graph.nodes if n.name.startswith("linear")]
    assert {stage.mark(name).precision for name in products} == {Precision.LOW}


@COMBINED
@pytest.mark.parametrize("name", BEHIND_INTEGERS)
def test_products_after_integers_are_low(name: str, how: Any) -> None:
    """What was computed from data, too, is rounded as the data is."""

    def program(x: torch.Tensor, w: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        h = BEHIND_INTEGERS[name](F.linear(x, w), n)
        return F.linear(F.linear(h, w).relu(), w)

    numbers = torch.tensor([[0, 1, 2, 3], [1, 1, 1, 1], [3, 1, 0, 2]])
    result = check(program, leaf(3, 4), leaf(4, 4), numbers, **how)
    found = [n for plan in result.plans for n in plan.nodes if n.op == "aten::linear"]
    assert len(found) >= 2
    assert {n.precision for n in found} == {"LOW"}


QUANTIZED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rounded": lambda h: (h * 8).round() / 8,
    "straight through": lambda h: h + ((h * 8).round() / 8 - h).detach(),
    "by floor": lambda h: (h * 8 + 0.5).floor() / 8,
    "clamped": lambda h: (h * 8).clamp(-7, 7).round() / 8,
    "by a scale of its own": lambda h: (h / (s := h.detach().abs().max() / 7)).round() * s,
    "what is left of a division": lambda h: h - torch.remainder(h, 0.125),
    "divided": lambda h: torch.div(h, 0.125, rounding_mode="trunc") * 0.125,
}


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_products_of_quantized_data_are_low(name: str, level: str, low: torch.dtype) -> None:
    """Though another layer rounds what they give."""
    quantized = QUANTIZED[name]

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(quantized(x.tanh()), quantized(w))
        return F.linear(quantized(h.tanh()), quantized(w))

    stage = ran(guard_constants, program, leaf(3, 4), leaf(4, 4), low=low, level=level)
    found = {stage.mark(name).precision for name in ("linear", "linear_1")}
    assert found == {Precision.LOW}


@pytest.mark.parametrize(
    "program",
    [
        lambda h, n: n.float(),
        lambda h, n: n.float() / 1000,
        lambda h, n: torch.cat([h[:, 1:], n[:, :1].float()], 1),
        lambda h, n: torch.where(n > 1, n.float(), h),
        lambda h, n: torch.where(n > 1, 70001, 0).float(),
        lambda h, n: torch.zeros(3, 4, dtype=n.dtype).scatter_add(1, n, torch.ones_like(n)).float(),
        lambda h, n: (n > 1).long().scatter(1, n, 70001).float(),
        lambda h, n: (n > 1).long().sort(1)[1].float(),
        lambda h, n: F.pad((n > 1).long()[:, :2], (1, 1), value=70001).float(),
        lambda h, n: (n > 1).long().masked_fill(n > 2, 70001).float(),
        lambda h, n: (F.one_hot(n[:, 0], 4) * 70001).float(),
        lambda h, n: (n * 3 + 1).float().unsqueeze(0)[0],
    ],
)
def test_integers_themselves_are_exact_for_one_product(program: Any) -> None:
    def whole(x: torch.Tensor, w: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(program(x.relu(), n), w).relu(), w)

    stage = ran(guard_constants, whole, leaf(3, 4), leaf(4, 4), torch.ones(3, 4).long())
    assert stage.mark("linear").precision is Precision.FULL
    assert stage.mark("linear_1").precision is Precision.LOW
