"""O2's working copies: how gradients are stored and added up, and who may change them."""

import copy
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import COMBINED
from copied_models import HALVES, Net, check_against_fp64, dtype_of, trained
from torch import nn

from mpcompile import LossScale, MPCompileWarning, MPOptimizer, mpcompile


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_are_stored_low_where_no_scale_multiplies_them(dtype: torch.dtype) -> None:
    model, _ = trained(Net(), dtype)
    x = torch.randn(4, 8)
    check_against_fp64(model, lambda net: net(x.to(dtype_of(net))).square().mean().backward())
    for name, p in model.named_parameters():
        is_low = dtype is torch.bfloat16 and not name.startswith("norm")
        assert p.grad.dtype is (dtype if is_low else torch.float32)


def test_a_model_called_twice_in_one_backward() -> None:
    model, _ = trained(Net())
    xs = torch.randn(2, 4, 8)

    def run(net: nn.Module) -> None:
        a, b = (net(x.to(dtype_of(net))) for x in xs)
        (a * b).mean().backward()

    check_against_fp64(model, run)


class Broken(nn.Module):
    """Two graphs that share a weight: the first reads it low, the second low or in FP32."""

    def __init__(self, second: str) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.second = second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        torch._dynamo.graph_break()
        if self.second == "low":
            return self.fc(y)
        return y * self.fc.weight.softmax(-1).sum()


@pytest.mark.parametrize("second", ["low", "full"])
def test_two_graphs_that_share_a_weight(second: str) -> None:
    model, optimizer = trained(Broken(second), lr=1e-3)
    x = torch.randn(4, 8)
    for _ in range(2):
        model.zero_grad()
        check_against_fp64(model, lambda net: net(x.to(dtype_of(net))).square().mean().backward())
        optimizer.step()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_gradient_from_outside_is_added(dtype: torch.dtype) -> None:
    model, optimizer = trained(Net(), dtype)
    x = torch.randn(4, 8)

    def run(net: nn.Module) -> None:
        loss = net(x.to(dtype_of(net))).square().mean()
        (loss + net.fc1.weight.square().sum()).backward()  # type: ignore[operator, union-attr]

    check_against_fp64(model, run)
    optimizer.step()


@pytest.mark.parametrize("first", ["inside", "outside"])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_gradient_from_outside_is_added_in_a_backward_of_its_own(
    dtype: torch.dtype, first: str
) -> None:
    model, optimizer = trained(Net(), dtype)
    x = torch.randn(4, 8)

    def run(net: nn.Module) -> None:
        losses = [
            lambda: net(x.to(dtype_of(net))).square().mean(),
            lambda: net.fc1.weight.square().sum(),  # type: ignore[operator, union-attr]
        ]
        for loss in losses if first == "inside" else reversed(losses):
            loss().backward()
        net(x.to(dtype_of(net))).square().mean().backward()

    check_against_fp64(model, run)
    optimizer.step()


def test_clipping_by_hand_works_in_bf16() -> None:
    model, optimizer = trained(Net(), torch.bfloat16)
    model(torch.randn(4, 8)).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    moved = torch.stack([(p - b).norm() for p, b in zip(model.parameters(), before, strict=True)])
    assert 0 < moved.norm() < 0.05 * 1e-3 * 1.05


ZEROED: dict[str, Callable[[torch.optim.Optimizer, nn.Module], object]] = {
    "to None": lambda o, m: o.zero_grad(),
    "by the optimizer": lambda o, m: o.zero_grad(set_to_none=False),
    "by the model": lambda o, m: m.zero_grad(set_to_none=False),
    "each": lambda o, m: [g.zero_() for g in grads(m)],
    "each, filled": lambda o, m: [g.fill_(0.0) for g in grads(m)],
    "each, as data": lambda o, m: [g.data.zero_() for g in grads(m)],
    "each, detached": lambda o, m: [g.detach().zero_() for g in grads(m)],
    "each, as a slice": lambda o, m: [operator.setitem(g, ..., 0.0) for g in grads(m)],
    "each, copied": lambda o, m: [g.copy_(torch.zeros_like(g)) for g in grads(m)],
    "each, as an array": lambda o, m: [g.float().numpy().fill(0.0) or g.zero_() for g in grads(m)],
    "all at once": lambda o, m: grads(m) and torch._foreach_zero_(grads(m)),
    "new zeros": lambda o, m: [setattr(p, "grad", torch.zeros_like(p)) for p in m.parameters()],
}


def grads(net: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


@COMBINED
@pytest.mark.parametrize("zero", ZEROED)
def test_small_gradients_move_weights_after_the_scale_has_dipped(zero: str, how: Any) -> None:
    """However gradients are zeroed between the steps: they bring no multiplier along."""
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    scale = LossScale.dynamic(init_scale=2.0**16, growth_interval=2, min_scale=2.0**-20)
    model = mpcompile(net, loss_scale=scale, **how)
    optimizer = MPOptimizer(torch.optim.SGD(net.parameters(), lr=1e4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MPCompileWarning)  # steps that are skipped, on purpose
        for i in range(34):
            x = torch.randn(8, 16)
            ZEROED[zero](optimizer, net)
            factor = float("inf") if 2 <= i < 14 else 1e-9
            (model(x).pow(2).sum() * factor).backward()
            before = copy.deepcopy(net)
            optimizer.step()
    (before.double()(x.double()).pow(2).sum() * 1e-9).backward()
    moved = net[0].weight.double() - before[0].weight
    wanted = -1e4 * before[0].weight.grad
    assert (moved - wanted).norm() < 0.05 * wanted.norm()
