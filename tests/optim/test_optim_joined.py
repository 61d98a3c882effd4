"""Small pieces of a step: which of them become one, what is kept, and that all of it is right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from step_pieces import cut, params_of, updates
from torch import nn

from mpcompile import LossScale, MPOptimizer, ir
from mpcompile.ir.step import Gradient, Slot
from mpcompile.optim.gathered import Gathered
from mpcompile.optim.inputs import Member
from mpcompile.optim.join_pieces import join_small, keep_results
from mpcompile.optim.pieces import SMALL, Piece, Split, signature

REST = pytest.mark.sweep("optimizers with more state")

F16, F32 = torch.float16, torch.float32
TEN = ((3,), (2, 4), (5,), (3, 3, 2), (7,), (2,), (4, 5), (6,), (9,), (2, 3))


# -- joined ------------------------------------------------------------------------------------


def test_small_updates_are_joined_in_parts_of_one_length() -> None:
    first, second = updates(join_small(cut(*TEN)))
    assert params_of(first) == [f"param{i}" for i in range(5)]
    assert params_of(second) == [f"param{i}" for i in range(5, 10)]
    assert signature(first) == signature(second)  # one program, whatever the shapes


def test_each_part_of_a_joined_piece_has_a_size_of_its_own() -> None:
    (joined,) = updates(join_small(cut((3,), (2, 4))))
    by_size: dict[int | None, set[int]] = {}
    for node, size in zip(joined.inputs, joined.sizes, strict=True):
        by_size.setdefault(size, set()).add(ir.value(node).numel())
    assert by_size == {0: {3}, 1: {8}, None: {1}}


def test_large_updates_stay_alone() -> None:
    step = join_small(cut((SMALL + 1,), (3,), (SMALL,), (SMALL + 1,)))
    assert sorted(map(params_of, updates(step))) == [["param0"], ["param1", "param2"], ["param3"]]


def test_what_is_common_is_one_input() -> None:
    """Whether to skip, and the clipping factor."""
    before = cut((3,), (2, 4))
    first, second = updates(before)
    (joined,) = updates(join_small(before))
    assert set(first.inputs) & set(second.inputs)
    assert len(joined.inputs) == len({*first.inputs, *second.inputs})


def operators(piece: Piece) -> int:
    return sum(n.op == "call_function" for n in piece.graph.graph.nodes)


@pytest.mark.parametrize("sizes", [TEN, ((3,), (), (SMALL + 1,), (2, 2))])
def test_nothing_is_lost_and_pieces_run_after_what_they_read(sizes: Any) -> None:
    before = cut(*sizes)
    joined = join_small(before)
    kept = keep_results(joined)
    count = sum(map(operators, before.pieces))
    results = sum(len(piece.results) for piece in kept.pieces)
    assert sum(map(operators, joined.pieces)) == count
    assert sum(map(operators, kept.pieces)) == count + results > count
    for step in (joined, kept):
        ready: set[Any] = set()
        for piece in step.pieces:
            read = piece.inputs[: len(piece.inputs) - len(piece.results)]
            assert all(n.op == "placeholder" or n in ready for n in read)
            ready.update(piece.outputs, piece.results)
        assert all(value in ready for _, value in step.commits)


def test_all_numbers_are_kept() -> None:
    step: Split = keep_results(join_small(cut((3,), (), (2, 2))))
    for piece in step.pieces:
        assert not any(ir.value(n).ndim == 0 for n in piece.outputs)
        assert piece.inputs[len(piece.inputs) - len(piece.results) :] == piece.results


# -- gathered ----------------------------------------------------------------------------------


def members(*gradients: torch.Tensor) -> list[Member]:
    found = []
    for gradient in gradients:
        p = nn.Parameter(torch.zeros_like(gradient, dtype=F32))
        p.grad_dtype = None
        p.grad = gradient
        found.append(Member(0, p))
    return found


def test_alike_gradients_lie_one_behind_the_other() -> None:
    gradients = [
        torch.randn(3),
        torch.randn(2, 4).half(),
        torch.randn(4, 2).t(),
        torch.ones(5).half(),
    ]
    own = members(*gradients)
    gathered = Gathered(own, [Gradient(g.dtype) for g in gradients])
    assert gathered.groups == ((0, 2), (1, 3))
    gathered.fill()
    for i, gradient in enumerate(gradients):
        place = gathered.held[Slot("grad", i)]
        assert torch.equal(place, gradient)
        assert (place.stride(), place.dtype) == (gradient.stride(), gradient.dtype)
    assert sorted(gathered.held[Slot("grads", 0)]) == sorted([*gradients[0], *gradients[2].ravel()])
    own[2].param.grad = torch.ones(4, 2).t()
    gathered.fill()
    assert torch.equal(gathered.held[Slot("grad", 2)], torch.ones(2, 4))


def test_gradients_of_other_scales_or_ranks_are_not_alike() -> None:
    kinds = [Gradient(F32, (0,)), Gradient(F32, (1,)), Gradient(F32, (0,), replicas=2)]
    found = Gathered(members(*map(torch.ones, (3, 3, 3))), kinds)
    assert found.groups == ()
    assert found.held == {}


@pytest.mark.parametrize(
    "gradient",
    [torch.ones(0), torch.ones(1 << 13), torch.ones(1).expand(4), torch.ones(4, 2)[:, 0]],
    ids=["no element", "large", "expanded", "with gaps"],
)
def test_gradients_that_are_not_gathered(gradient: torch.Tensor) -> None:
    found = Gathered(members(torch.ones(3), gradient, torch.ones(3)), [Gradient(F32)] * 3)
    assert found.groups == ((0, 2),)


# -- a step over many small parameters --------------------------------------------------------

# Of each kind: numbers, single elements, small and large ones.
MANY = (*TEN, (), (1,), (130, 130), (3, 2), (17, 5), (2, 2, 2), (1, 1), (64, 65))
MAKERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "two groups": lambda p: torch.optim.AdamW(
        [{"params": p[::2]}, {"params": p[1::2], "lr": 0.01, "weight_decay": 0.3}], lr=0.1
    ),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}
LONGER = ("two groups", "RMSprop", "Adafactor")  # to compile


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in MANY]


def give(params: Sequence[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.slow("trains with several optimizers")
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "clip"),
    [
        ("AdamW", None),
        ("AdamW", 0.5),
        ("SGD", None),
        *(pytest.param(name, None, marks=REST) for name in LONGER),
    ],
)
def test_many_small_parameters_are_updated_as_by_torch(name: str, clip: float | None) -> None:
    expected, params = parameters(), parameters()
    plain, ours = MAKERS[name](expected), MPOptimizer(MAKERS[name](params), max_grad_norm=clip)
    for seed in range(3):
        for own, optimizer in ((expected, plain), (params, ours)):
            give(own, seed)
            if clip is not None and optimizer is plain:
                total = nn.utils.clip_grad_norm_(own, clip)
            optimizer.step()
        if clip is not None:
            torch.testing.assert_close(ours.grad_norm, total)
    for p, q in zip(params, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert ours.compilations == 1


@pytest.mark.slow("trains with several optimizers")
def test_one_bad_element_anywhere_skips_the_whole_step() -> None:
    params = parameters()
    ours = MPOptimizer(torch.optim.AdamW(params, lr=0.1), loss_scale=LossScale.static(1.0))
    good = 0
    for index in (0, MANY.index((130, 130)), MANY.index(()), len(MANY) - 1):
        for bad in (math.inf, -math.inf, math.nan):
            give(params, good)
            ours.step()
            good += 1
            assert not bool(ours.skipped)
            before = [p.detach().clone() for p in params]
            give(params, good)
            params[index].grad.view(-1)[-1] = bad  # type: ignore[union-attr]
            ours.step()
            assert bool(ours.skipped)
            assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
            assert {int(ours.state[p]["step"]) for p in params} == {good}


@pytest.mark.slow("trains with several optimizers")
def test_a_gradient_with_another_stride_in_a_dim_of_one_is_flat() -> None:
    """As of a 1x1 convolution whose images are laid out channels-last."""
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.linspace(0, 1, 12).view(4, 3, 1, 1)) for _ in range(2))
    optimizer = MPOptimizer(torch.optim.SGD([ours], lr=0.1, momentum=0.9))
    plain = torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    for _ in range(3):
        gradient = torch.randn(12).as_strided((4, 3, 1, 1), (3, 1, 3, 3))
        ours.grad, theirs.grad = gradient, gradient.clone()
        optimizer.step()
        plain.step()
    torch.testing.assert_close(ours, theirs)
    (step,) = optimizer._steps.all
    assert all(piece.flat for piece in updates(step.program.step))
