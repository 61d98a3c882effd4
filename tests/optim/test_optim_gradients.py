"""MPOptimizer over any gradients and memory layouts: the parameters that plain PyTorch makes."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from twins import Twins

from mpcompile import MPOptimizer

momentum = functools.partial(SGD, lr=0.1, momentum=0.9)
decayed = functools.partial(AdamW, lr=0.1, weight_decay=0.1)


# -- gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    twins = Twins(momentum)
    twins.step()
    for optimizer in twins.both:
        optimizer.zero_grad(set_to_none=set_to_none)
    for p, q in zip(twins.mine, twins.theirs, strict=True):
        assert p.grad is None if set_to_none else torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    for optimizer in twins.both:
        optimizer.step()
    twins.agree()


@pytest.mark.filterwarnings("ignore:mpcompile. this step of")  # where a test before compiled
def test_parameters_that_start_without_a_gradient_or_an_element() -> None:
    twins = Twins(decayed, [torch.randn(3), torch.randn(0, 4)])
    for _ in range(2):
        twins.step()
    torch.testing.assert_close(twins.mine, twins.theirs)
    MPOptimizer(decayed([nn.Parameter(torch.ones(2))])).step()  # nothing to do, nothing done


@pytest.mark.parametrize("max_norm", [0.1, 3.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_is_clip_grad_norm(max_norm: float, dtype: torch.dtype) -> None:
    twins = Twins(functools.partial(momentum, weight_decay=0.1),
                  [torch.randn(s, dtype=dtype) for s in [(3, 4), (5,), ()]],
                  max_grad_norm=max_norm)  # fmt: skip
    for _ in range(3):
        twins.step_clipped(max_norm, rtol=1e-6, atol=0)
    twins.agree()


def test_the_gradients_are_left_as_they_were() -> None:
    twins = Twins(functools.partial(decayed, maximize=True), max_grad_norm=0.1)
    twins.give()
    before = [p.grad.clone() for p in twins.mine]  # type: ignore[union-attr]
    twins.optimizer.step()
    for p, grad in zip(twins.mine, before, strict=True):
        assert torch.equal(p.grad, grad)  # type: ignore[arg-type]


@pytest.mark.slow_rows("trains with several optimizers")
@pytest.mark.parametrize("emit", ["eager", "inductor"])
def test_double_parameters(emit: str) -> None:
    """What the class computes in FP64, it computes in FP64."""
    tensors = [torch.randn(s, dtype=torch.float64) for s in [(3, 4), ()]]
    twins = Twins(functools.partial(decayed, eps=1e-3), [*tensors, torch.randn(5)], emit=emit)
    for _ in range(3):
        twins.step()
    assert {p.dtype for p in twins.mine} == {torch.float64, torch.float32}
    twins.agree()


def test_double_gradients_have_the_range_of_double() -> None:
    twins = Twins(momentum, [torch.randn(3, dtype=torch.float64)])
    twins.step([torch.full((3,), 1e200, dtype=torch.float64)])
    assert not twins.optimizer.skipped
    twins.agree()


# -- memory layouts ---------------------------------------------------------------------------


def dense(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def last(*shape: int) -> torch.Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def gaps(*shape: int) -> torch.Tensor:
    return torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]


def flipped(*shape: int) -> torch.Tensor:
    return torch.randn(shape).transpose(0, 1).contiguous().transpose(0, 1)


def spread(*shape: int) -> torch.Tensor:
    return torch.randn(1, *shape[1:]).expand(shape)


@pytest.mark.slow("trains with several optimizers")
@pytest.mark.parametrize("emit", ["eager", "inductor"])
@pytest.mark.parametrize(
    ("weight", "gradient"),
    [(last, dense), (dense, last), (last, last), (gaps, dense), (dense, gaps), (flipped, dense),
     (dense, spread)],
)  # fmt: skip
def test_layouts_of_weight_and_gradient(
    weight: Callable[..., torch.Tensor], gradient: Callable[..., torch.Tensor], emit: str
) -> None:
    shape = (4, 3, 3, 2)
    start = weight(*shape)
    twins = Twins(momentum, [start], emit=emit)
    assert twins.mine[0].stride() == start.stride()
    for _ in range(3):
        twins.step([gradient(*shape)])
    twins.agree()


@pytest.mark.slow_rows("trains with several optimizers")
@pytest.mark.parametrize("emit", ["eager", "inductor"])
def test_parameters_in_one_buffer(emit: str) -> None:
    """As flattened parameters are: each writes its own part and no other."""
    buffer = torch.randn(24)
    params = [nn.Parameter(buffer[:10].view(2, 5)), nn.Parameter(buffer[10:15])]
    expected = buffer.clone()
    optimizer = MPOptimizer(SGD(params, lr=1.0), emit=emit)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    expected[:15] -= 1
    assert torch.equal(buffer, expected)


@pytest.mark.parametrize(
    "move",
    [
        lambda p: torch.nn.utils.vector_to_parameters(torch.arange(12.0), [p]),
        lambda p: setattr(p, "data", p.data.double()),
        lambda p: setattr(p, "data", p.data.t().contiguous().t()),
    ],
    ids=["vector_to_parameters", "double", "transposed"],
)
def test_a_parameter_that_was_moved_is_still_trained(move: Callable[[Any], Any]) -> None:
    twins = Twins(functools.partial(SGD, lr=0.1), [torch.randn(3, 4)])
    for step in range(3):
        if step == 1:
            for params in (twins.mine, twins.theirs):
                move(params[0])
        twins.step()
    twins.agree()
