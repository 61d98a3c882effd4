"""MPOptimizer over any gradients and memory layouts, and with settings of param groups that change
between steps: the parameters that plain PyTorch makes.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from twins import Twins

from mpcompile import MPOptimizer

pytestmark = pytest.mark.inside

momentum = functools.partial(SGD, lr=0.1, momentum=0.9)
decayed = functools.partial(AdamW, lr=0.1, weight_decay=0.1)


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: StepLR(o, 2, 0.5),
        lambda o: LambdaLR(o, lambda step: 1 / (step + 1)),
        lambda o: ReduceLROnPlateau(o, patience=0),
    ],
    ids=["StepLR", "LambdaLR", "ReduceLROnPlateau"],
)
@pytest.mark.parametrize("make", [momentum, decayed])
def test_a_schedule_of_the_learning_rate_compiles_once(
    make: Any, schedule: Callable[[Optimizer], Any]
) -> None:
    twins = Twins(make)
    schedulers = [schedule(o) for o in twins.both]
    for _ in range(6):
        twins.step()
        for scheduler in schedulers:
            scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
    assert twins.optimizer.param_groups[0]["lr"] != 0.1
    twins.agree()
    assert twins.optimizer.compilations == 1


@pytest.mark.parametrize("make", [momentum, decayed])
def test_one_cycle_moves_momentum_too(make: Any) -> None:
    twins = Twins(make)
    schedulers = [OneCycleLR(o, max_lr=0.2, total_steps=5) for o in twins.both]
    for _ in range(4):
        twins.step()
        for scheduler in schedulers:
            scheduler.step()
    twins.agree()
    assert twins.optimizer.compilations <= 2


def test_a_scheduler_over_the_inner_optimizer_works_too() -> None:
    """And does not warn that nobody stepped."""
    parameter = nn.Parameter(torch.zeros(2))
    inner = SGD([parameter], lr=1.0)
    scheduler = StepLR(inner, 1, 0.5)
    optimizer = MPOptimizer(inner, emit="eager")
    for expected in (-1.0, -1.5):
        parameter.grad = torch.ones(2)
        optimizer.step()
        scheduler.step()
        assert parameter.tolist() == [expected, expected]


@pytest.mark.parametrize("cls", [SGD, AdamW])
def test_a_tensor_for_a_learning_rate(cls: type[Optimizer]) -> None:
    twins = Twins(lambda p: cls(p, lr=torch.tensor(0.1)))  # type: ignore[call-arg]
    for _ in range(3):
        twins.step()
        for optimizer in twins.both:
            optimizer.param_groups[0]["lr"].mul_(0.5)
    twins.agree()
    assert twins.optimizer.compilations == 1


Change = Callable[[Any, list[nn.Parameter]], object]
plain = functools.partial(SGD, lr=0.1)


def setting(name: str, value: Any) -> Change:
    return lambda optimizer, _: optimizer.param_groups[0].update({name: value})


CHANGES: dict[str, tuple[Any, Change, int | None]] = {
    "weight_decay": (momentum, setting("weight_decay", 0.3), 2),
    "momentum": (momentum, setting("momentum", 0.5), 2),
    "nesterov": (momentum, setting("nesterov", True), 2),
    "maximize": (momentum, setting("maximize", True), 2),
    "betas": (decayed, setting("betas", (0.5, 0.6)), 2),
    "eps": (decayed, setting("eps", 0.1), 2),
    "a first momentum": (plain, setting("momentum", 0.9), 2),
    "a group added": (
        lambda p: momentum(p[:2]),
        lambda o, p: o.add_param_group({"params": p[2:], "lr": 0.5}), 2,
    ),
    "a group removed": (
        lambda p: momentum([{"params": p[:1]}, {"params": p[1:]}]),
        lambda o, p: setattr(o, "param_groups", o.param_groups[1:]), None,
    ),
    "the state thrown away": (
        decayed, lambda o, p: setattr(o, "state", type(o.state)(dict)), None
    ),
    "vector_to_parameters": (
        plain, lambda o, p: nn.utils.vector_to_parameters(torch.arange(12.0), p[:1]), None
    ),
    "double": (plain, lambda o, p: setattr(p[0], "data", p[0].data.double()), None),
    "transposed": (
        plain, lambda o, p: setattr(p[0], "data", p[0].data.t().contiguous().t()), None
    ),
}  # fmt: skip
"""The optimizer, what is changed between its steps, and how often it is compiled by then."""


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_between_steps_is_honoured(name: str) -> None:
    make, change, compilations = CHANGES[name]
    twins = Twins(make)
    for step in range(5):
        if step == 2:
            for optimizer, params in zip(twins.both, (twins.theirs, twins.mine), strict=True):
                change(optimizer, params)
        twins.step()
    twins.agree()
    assert compilations in (None, twins.optimizer.compilations)
    assert len(twins.optimizer.param_groups) == len(twins.reference.param_groups)


def test_a_learning_rate_that_was_a_tensor_for_one_step() -> None:
    p = nn.Parameter(torch.zeros(()))
    optimizer = MPOptimizer(SGD([p], lr=1.0), emit="eager")
    for rate in (1.0, torch.tensor(2.0), 1.0):
        optimizer.param_groups[0]["lr"] = rate
        p.grad = torch.ones(())
        optimizer.step()
    assert p.item() == -4.0


def test_param_groups_with_settings_of_their_own() -> None:
    def make(p: Any) -> Optimizer:
        return AdamW([{"params": p[:1], "lr": 0.3, "weight_decay": 0.0, "betas": (0.5, 0.9)},
                      {"params": p[1:2], "amsgrad": True}, {"params": p[2:], "maximize": True}],
                     lr=0.1)  # fmt: skip

    twins = Twins(make)
    twins.train()


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
    make = functools.partial(decayed, eps=1e-3)
    twins = Twins(make, [*tensors, torch.randn(5)], emit=emit, max_grad_norm=0.1)
    twins.step_clipped(0.1, [None, None, torch.randn(5)])
    for _ in range(3):
        twins.step_clipped(0.1)
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
