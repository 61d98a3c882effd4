"""A backward that leaves FP16's range: what FP32's own gradients say about it."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_of import module_of
from torch import nn

from mpcompile import MPOptimizer, Policy, loss_scale_of, mpcompile

Loss = Callable[[torch.Tensor], torch.Tensor]
DEPTH = 6


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [layer for _ in range(DEPTH) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(16, 4))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 16, generator=generator)
    return x, torch.randn(32, 4, generator=generator)


def steep(y: torch.Tensor) -> Loss:
    """A loss whose gradient is about 1e13: the gradients of all layers fit FP16 at no scale."""
    return lambda out: ((out * 1e6 - y * 3e6) ** 2).sum()


def trained(
    model: nn.Module, loss_of: Loss, *inputs: torch.Tensor, steps: int, idle: int = 0,
    generated: bool = False,
) -> tuple[list[float], list[str]]:  # fmt: skip
    """The losses and warnings of a training whose first `idle` steps change nothing."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3)
    if generated:
        optimizer = MPOptimizer(optimizer, emit="eager")
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model(*inputs))
            loss.backward()
            if step >= idle:
                optimizer.step()
            losses.append(float(loss.detach()))
    return losses, [str(w.message) for w in caught]


def mixed(model: nn.Module, **options: Any) -> nn.Module:
    return mpcompile(model, dtype=torch.float16, emit="eager", strict=True, **options)


@pytest.mark.slow_rows("trainings that overflow, against FP64")
@pytest.mark.parametrize("generated", [False, True])
def test_all_layers_with_steep_gradients_are_pinned_at_once(generated: bool) -> None:
    x, y = data()
    model = mixed(deep(), repair=True, level="O2" if generated else "O1")
    losses, said = trained(model, steep(y), x, steps=80, generated=generated)
    (event,) = loss_scale_of(model).repairs.events
    assert all(f"linear_{i}" in event for i in range(1, DEPTH + 1))
    assert said == []
    skipped = loss_scale_of(model).skipped_steps
    assert skipped == 5
    wanted, _ = trained(deep(), steep(y), x, steps=80, idle=skipped)
    torch.testing.assert_close(losses[-8:], wanted[-8:], rtol=1e-3, atol=0)
    assert wanted[-1] < 0.99 * wanted[0]


def distance() -> Any:
    """The gradient of a root is infinite at 0, where the sample is masked, and 0 * inf is NaN."""

    def forward(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return m.last((m.first(x) * mask).square().sum(-1, keepdim=True).sqrt())

    return module_of(forward, first=nn.Linear(16, 8), last=nn.Linear(1, 8))


def test_a_gradient_that_is_infinite_in_fp32_too_is_not_repaired() -> None:
    model = mixed(distance(), repair=True, loss_scale=128.0)
    mask = torch.ones(8, 1)
    mask[0] = 0
    inputs = torch.randn(8, 16), mask
    _, (warning,) = trained(model, lambda out: out.square().mean(), *inputs, steps=20)
    assert "steps in a row were skipped" in warning
    assert not loss_scale_of(model).repairs.events


class Kept(nn.Module):
    """Writes to a buffer, draws random numbers, and passes a gradient on to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.side = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y: torch.Tensor = self.last(self.drop(torch.tanh(self.norm(self.first(x)))))
        return y, self.side(x)


def _after_a_repair(*, repair: bool) -> dict[str, torch.Tensor]:
    """The state, gradients and random state after five skipped steps."""
    torch.manual_seed(0)
    model = mixed(Kept(), loss_scale=2.0**16, repair=repair)
    x = torch.randn(8, 16, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        high, side = model(torch.sin(x))
        (high.square().sum() * 1e6 + side.sum() * 1e-3).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
    assert len(loss_scale_of(model).repairs.events) == repair
    gradients = {f"grad of {name}": p.grad for name, p in model.named_parameters()}
    assert x.grad is not None
    kept = {"x": x.grad, "random": torch.get_rng_state(), **model.state_dict()}
    return {**kept, **{name: grad for name, grad in gradients.items() if grad is not None}}


def test_a_repair_touches_nothing() -> None:
    """It leaves all as where it does not run: gradients, running means and random numbers."""
    wanted, found = _after_a_repair(repair=False), _after_a_repair(repair=True)
    assert found.keys() == wanted.keys()
    assert bool(wanted["grad of side.weight"].isfinite().all())
    for name in wanted:
        assert torch.equal(found[name].nan_to_num(), wanted[name].nan_to_num()), name


@pytest.mark.slow("trainings that overflow, against FP64")
def test_a_step_within_the_backward_is_judged_as_well() -> None:
    """The run in FP32 has a backward of its own, after that one."""
    x, y = data()
    model = mixed(deep(), repair=True, loss_scale=128.0)
    last = [torch.optim.SGD([p], 1e-16) for p in model.parameters()]
    for p, optimizer in zip(model.parameters(), last, strict=True):

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(step)
    for _ in range(12):
        steep(y)(model(x)).backward()
    (event,) = loss_scale_of(model).repairs.events
    assert all(f"linear_{i}" in event for i in range(1, DEPTH + 1))


BOUNDED = ["sigmoid", "maximum", "minimum"]


def bounded() -> Any:
    """Its user says that the bound may be rounded: to 1, where a logit is infinite. (After a
    clamp, torch 2.14 knows that there is no gradient.)
    """

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        least, most = m.bounds
        return torch.logit((50 * m.layer(x)).sigmoid().maximum(least).minimum(most))

    bounds = nn.Buffer(torch.tensor([[1e-4], [1 - 1e-4]]))
    return module_of(forward, layer=nn.Linear(16, 4), bounds=bounds)


def test_of_an_fp32_operator_what_feeds_it_is_pinned() -> None:
    x, y = data()
    policy = Policy(low=BOUNDED)
    model = mixed(bounded(), loss_scale=1.0, level="O2", policy=policy, repair=True)
    losses, said = trained(model, lambda out: (out - y).square().mean(), x, steps=8)
    (event,) = loss_scale_of(model).repairs.events
    assert "logit = aten::logit: its result is not finite because what it reads was" in event
    assert "pinned to FP32: minimum" in event
    assert said == []
    assert math.isfinite(losses[-1])
