"""A backward that leaves FP16's range: what FP32's own gradients say about it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mpcompile import MPOptimizer, Policy, loss_scale_of, mpcompile
from mpcompile.observe.fault import Fault, Kind
from mpcompile.observe.watch import Watch
from mpcompile.records import repairs_of
from mpcompile.runtime.watched_call import Look

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
    (event,) = repairs_of(model)
    assert all(f"linear_{i}" in event for i in range(1, DEPTH + 1))
    assert said == []
    skipped = loss_scale_of(model).skipped_steps
    # The scale must have fallen from 2**16 to below 1 before, and looks come ever later.
    assert 16 < skipped < 48
    wanted, _ = trained(deep(), steep(y), x, steps=80, idle=skipped)
    torch.testing.assert_close(losses[-8:], wanted[-8:], rtol=1e-3, atol=0)
    assert wanted[-1] < 0.99 * wanted[0]


class Distance(nn.Module):
    """The gradient of a root is infinite at 0, where the sample is masked, and 0 * inf is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 8), nn.Linear(1, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        square = (self.first(x) * mask).square().sum(-1, keepdim=True)
        y: torch.Tensor = self.last(torch.sqrt(square))
        return y


@pytest.mark.parametrize("repair", [False, True])
def test_a_gradient_that_is_infinite_in_fp32_too_is_not_repaired(repair: bool) -> None:
    torch.manual_seed(0)
    model = mixed(Distance(), repair=repair, loss_scale=128.0)
    mask = torch.ones(8, 1)
    mask[0] = 0
    inputs = torch.randn(8, 16), mask
    _, (warning,) = trained(model, lambda out: out.square().mean(), *inputs, steps=20)
    assert "SqrtBackward0" in warning
    assert "does so in FP32" in warning
    assert "Policy(" not in warning
    assert repairs_of(model) == ()


class Kept(nn.Module):
    """Writes to a buffer, draws random numbers, and passes a gradient on to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.side = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y: torch.Tensor = self.last(self.drop(torch.tanh(self.norm(self.first(x)))))
        return y, self.side(x)


def _after_a_look(monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> dict[str, torch.Tensor]:
    """The state, gradients and random state after a watched step that was skipped."""
    torch.manual_seed(0)
    model = mixed(Kept(), loss_scale=2.0**16)
    x = torch.randn(8, 16, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    runs, run = [], Watch.run

    def counted(self: Watch, *args: Any) -> Any:
        runs.append(self)
        if fails and len(runs) == 2:
            raise RuntimeError("out of memory")
        return run(self, *args)

    monkeypatch.setattr(Watch, "run", counted)
    for step in range(3):
        loss_scale_of(model).trouble.pending = step == 1
        high, side = model(torch.sin(x))
        (high.square().sum() * 1e6 + side.sum() * 1e-3).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
    assert len(runs) == 2, "the call, and the call in FP32"
    monkeypatch.undo()
    gradients = {f"grad of {name}": p.grad for name, p in model.named_parameters()}
    assert x.grad is not None
    kept = {"x": x.grad, "random": torch.get_rng_state(), **model.state_dict()}
    return {**kept, **{name: grad for name, grad in gradients.items() if grad is not None}}


def test_the_run_in_fp32_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves all as where it does not run: gradients, running means and random numbers."""
    wanted = _after_a_look(monkeypatch, fails=True)
    found = _after_a_look(monkeypatch, fails=False)
    assert found.keys() == wanted.keys()
    assert bool(wanted["grad of side.weight"].isfinite().all())
    for name in wanted:
        assert torch.equal(found[name].nan_to_num(), wanted[name].nan_to_num()), name


def test_without_the_run_in_fp32_the_low_one_says_what_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = data()
    model = mixed(deep(), loss_scale=128.0)
    backward = torch.autograd.backward

    def fails(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(tensors, list):  # as the run in FP32 calls it
            raise torch.OutOfMemoryError("none left")
        backward(tensors, *args, **kwargs)

    monkeypatch.setattr(torch.autograd, "backward", fails)
    _, (warning,) = trained(model, steep(y), x, steps=8)
    assert f"'linear_{DEPTH}': 'fp32'" in warning
    assert "'linear_1'" not in warning  # its gradient is not known


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
    (event,) = repairs_of(model)
    assert all(f"linear_{i}" in event for i in range(1, DEPTH + 1))


class Masked(nn.Module):
    """Returns a mask that is meant to be infinite. The gradients fit at a small scale."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.last(x), torch.log(mask)


def test_infinite_values_do_not_end_the_looking_while_the_scale_falls() -> None:
    torch.manual_seed(0)
    model = mixed(Masked(), loss_scale="grad_scaler")
    mask = (torch.rand(8, 4) > 0.5).float()

    def loss_of(results: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        out, bias = results
        return torch.where(bias == 0, out, 0).square().mean() * 1e4

    _, said = trained(model, loss_of, torch.randn(8, 16), mask, steps=24)  # type: ignore[arg-type]
    assert said == []
    assert 5 < loss_scale_of(model).skipped_steps < 20


@pytest.mark.parametrize("repair", [False, True])
def test_what_is_in_fp32_already_is_no_advice(
    monkeypatch: pytest.MonkeyPatch, repair: bool
) -> None:
    def fault(self: Look) -> Fault:
        line = next(n for n in self.graph.plan.nodes if n.name == "linear_1")
        assert line.precision == "FULL"
        return Fault(Kind.BACKWARD, line, "a reason", pins=("linear_1",))

    monkeypatch.setattr(Look, "fault", fault)
    x, y = data()
    model = mixed(
        deep(), loss_scale=128.0, repair=repair, policy=Policy(nodes={"linear_1": "fp32"})
    )
    _, (warning,) = trained(model, steep(y), x, steps=8)
    assert "linear_1 = aten::linear: a reason" in warning
    assert "'linear_1'" not in warning
    assert ("no operator can be kept" if repair else "finds which of what feeds it") in warning
    assert "mpcompile.diagnose(model, inputs, loss_fn=...)" in warning
    assert repairs_of(model) == ()


BOUNDED = ["sigmoid", "maximum", "minimum"]


class Bounded(nn.Module):
    """Its user says that the bound may be rounded: to 1, where a logit is infinite. (Behind a
    clamp, torch 2.14 knows that there is no gradient.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.bounds = nn.Buffer(torch.tensor([[1e-4], [1 - 1e-4]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        least, most = self.bounds
        return torch.logit((50 * self.layer(x)).sigmoid().maximum(least).minimum(most))


def test_of_an_fp32_operator_what_feeds_it_is_named() -> None:
    torch.manual_seed(0)
    x, y = data()
    policy = Policy(low=BOUNDED)
    model = mixed(Bounded(), loss_scale=1.0, level="O2", policy=policy)
    _, (warning,) = trained(model, lambda out: (out - y).square().mean(), x, steps=8)
    assert "logit = aten::logit: its result is not finite because what it reads was" in warning
    assert "nodes={'minimum': 'fp32'}" in warning
    cured = Policy(low=BOUNDED, nodes={"minimum": "fp32"})
    model = mixed(Bounded(), loss_scale=1.0, level="O2", policy=cured)
    assert trained(model, lambda out: (out - y).square().mean(), x, steps=8)[1] == []
