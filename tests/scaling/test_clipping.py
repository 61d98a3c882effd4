"""`clip_grad_norm_` and `clip_grad_value_` where O2 stores gradients times the loss scale."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mpcompile import (
    LossScale,
    MPCompileError,
    MPOptimizer,
    clip_grad_norm_,
    clip_grad_value_,
    mpcompile,
)

OVERFLOWS = 1e30


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))


class Pair:
    """An O2 model in FP16 with an MPOptimizer, beside a plain one in FP64."""

    def __init__(self, dtype: torch.dtype = torch.float16, level: str = "O2") -> None:
        self.model = net()
        self.reference = copy.deepcopy(self.model).double()
        scale = LossScale.dynamic(1024.0) if dtype is torch.float16 else "dynamic"
        mpcompile(self.model, level=level, dtype=dtype, emit="eager", loss_scale=scale, strict=True)
        self.optimizer = MPOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1), emit="eager")
        self.plain = torch.optim.SGD(self.reference.parameters(), lr=0.1)

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def theirs(self) -> list[nn.Parameter]:
        return list(self.reference.parameters())

    def backward(self, factor: float = 1.0) -> None:
        x = torch.randn(4, 16)
        (self.model(x).square().sum() * factor).backward()
        (self.reference(x.double()).square().sum() * factor).backward()

    def step(self) -> None:
        for optimizer in (self.optimizer, self.plain):
            optimizer.step()
            optimizer.zero_grad()
        for mine, other in zip(self.params, self.theirs, strict=True):
            torch.testing.assert_close(mine.double(), other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_it_clips_as_torch_clips_true_gradients(norm_type: float) -> None:
    pair = Pair()
    for step in range(3):
        pair.backward()
        assert {p.grad.dtype for p in pair.params} == {torch.float16, torch.float32}
        limit = 0.2 * (step + 1)
        mine = clip_grad_norm_(pair.params, limit, norm_type)
        other = torch.nn.utils.clip_grad_norm_(pair.theirs, limit, norm_type)
        assert other > limit
        torch.testing.assert_close(mine.double(), other, rtol=2e-3, atol=0)
        pair.step()
    assert pair.optimizer.compilations == 1  # though the limit changed
    assert pair.optimizer.skipped_steps == 0


def test_a_norm_below_the_limit_changes_nothing() -> None:
    pair = Pair()
    pair.backward()
    clip_grad_norm_(pair.params, math.inf)
    clip_grad_norm_(iter(pair.params), 1e6)
    pair.step()


def test_the_order_of_the_norm_may_be_a_word() -> None:
    pair = Pair()
    pair.backward()
    mine = clip_grad_norm_(pair.params, 0.2, "inf")
    other = torch.nn.utils.clip_grad_norm_(pair.theirs, 0.2, "inf")
    torch.testing.assert_close(mine.double(), other, rtol=2e-3, atol=0)


@pytest.mark.parametrize("zeros", [0, 1])
def test_order_0_counts_gradients_as_torch_does(zeros: int) -> None:
    pair = Pair()
    if zeros:  # then the last weight sees zeros
        for model in (pair.model, pair.reference):
            model[1].weight.detach().zero_()
    pair.backward()
    mine = clip_grad_norm_(pair.params, 100.0, 0)
    other = torch.nn.utils.clip_grad_norm_(pair.theirs, 100.0, 0)
    assert mine.item() == other.item() > 1


def test_all_of_them_after_some() -> None:
    """The second call finds gradients of one loss scale that have different multipliers."""
    pair = Pair()
    pair.backward()
    norms = []
    for params, clip in ((pair.params, clip_grad_norm_),
                         (pair.theirs, torch.nn.utils.clip_grad_norm_)):  # fmt: skip
        clip(params[:2], 0.1)
        norms.append(clip(params, 0.3).double())
    torch.testing.assert_close(*norms, rtol=2e-3, atol=0)
    pair.step()


def test_some_of_the_parameters_and_one() -> None:
    pair = Pair()
    pair.backward()
    for params, clip in ((pair.params, clip_grad_norm_),
                         (pair.theirs, torch.nn.utils.clip_grad_norm_)):  # fmt: skip
        clip(params[:2], 0.1)
        clip(params[4], 0.3)
    pair.step()


def test_gradients_accumulate_onto_clipped_ones() -> None:
    pair = Pair()
    pair.backward()
    clip_grad_norm_(pair.params, 0.5)
    torch.nn.utils.clip_grad_norm_(pair.theirs, 0.5)
    pair.backward(0.01)
    pair.step()


def test_it_clips_values() -> None:
    pair = Pair()
    for limit in (0.3, 0.1):
        pair.backward()
        assert max(float(p.grad.abs().max()) for p in pair.theirs) > limit
        clip_grad_value_(pair.params, limit)
        torch.nn.utils.clip_grad_value_(pair.theirs, limit)
        pair.step()


@pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_])
def test_an_overflow_is_not_clipped_away(clip: Callable[..., Any]) -> None:
    """An infinity that only the stored gradient shows: sums of 1024 * 10 * (more than 6.4)."""
    model = nn.Sequential(nn.Linear(16, 8, bias=False))
    scale = LossScale.dynamic(1024.0)
    mpcompile(model, level="O2", dtype=torch.float16, emit="eager", loss_scale=scale, strict=True)
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), emit="eager")
    (weight,) = model.parameters()
    before = weight.detach().clone()
    (model(torch.rand(16, 16) + 1).sum() * 10).backward()
    assert weight.grad is not None
    assert bool(weight.grad.isinf().all())
    clip([weight], 0.1)
    optimizer.step()
    assert bool(optimizer.skipped)
    assert torch.equal(weight, before)


def test_a_norm_that_is_not_finite_raises_on_request() -> None:
    pair = Pair()
    (pair.model(torch.randn(4, 16)).square().sum() * OVERFLOWS).backward()
    with pytest.raises(RuntimeError, match="finite"):
        clip_grad_norm_(pair.params, 1.0, error_if_nonfinite=True)


def test_a_gradient_that_was_changed_is_refused() -> None:
    pair = Pair()
    pair.backward()
    torch.nn.utils.clip_grad_norm_(pair.params, 1.0)
    with pytest.raises(MPCompileError, match=r"mpcompile\.clip_grad_norm_"):
        clip_grad_norm_(pair.params, 1.0)


@pytest.mark.parametrize(("dtype", "level"), [(torch.bfloat16, "O2"), (torch.float16, "O1")])
def test_gradients_as_they_are_go_to_torch(dtype: torch.dtype, level: str) -> None:
    pair = Pair(dtype, level)
    pair.backward()
    twin = copy.deepcopy([p.grad for p in pair.params])
    norm = clip_grad_norm_(pair.params, 0.5)
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(twin), rtol=0, atol=0)
    torch.nn.utils.clip_grads_with_norm_([_holding(g) for g in twin], 0.5, norm)
    assert all(torch.equal(p.grad, g) for p, g in zip(pair.params, twin, strict=True))


def _holding(gradient: torch.Tensor) -> torch.Tensor:
    holder = torch.zeros_like(gradient)
    holder.grad = gradient
    return holder
