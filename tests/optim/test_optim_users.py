"""Optimizers people write themselves: what is compiled, and what is refused in which words; and of
those that have a `train()` and an `eval()`, that an MPOptimizer hands them on.
"""

import functools
from typing import Any

import pytest
import torch
from as_written import AsWritten
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from twins import Twins

from mpcompile import LossScale, MPCompileError, MPOptimizer


class Mine(AsWritten):
    """Momentum, whose state is made where it is first needed."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, lr, beta=beta)

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        assert p.grad is not None
        if "m" not in state:
            state["m"] = torch.zeros_like(p)
            state["step"] = torch.zeros((), device=p.device)
        state["step"] += 1
        state["m"].lerp_(p.grad, 1 - group["beta"])
        p.sub_(state["m"] / (1 - group["beta"] ** state["step"]) * group["lr"])


# -- what works -------------------------------------------------------------------------------


@pytest.mark.slow("trains with several optimizers")
@pytest.mark.parametrize("emit", ["eager", "inductor"])
def test_state_made_inside_the_step(emit: str) -> None:
    """The first step runs op by op and makes it; the second is compiled."""
    twins = Twins(Mine, emit=emit, max_grad_norm=1e6)
    for step, compilations in enumerate([0, 1, 1, 1]):
        twins.step()
        assert twins.optimizer.compilations == compilations, step
    twins.agree()


def test_the_first_step_is_checked_and_clipped_too() -> None:
    twins = Twins(Mine, max_grad_norm=0.1)
    before = [p.detach().clone() for p in twins.mine]
    twins.give([torch.full_like(p, float("nan")) for p in twins.mine])
    twins.optimizer.step()
    assert twins.optimizer.skipped
    torch.testing.assert_close([p.detach() for p in twins.mine], before, rtol=0, atol=0)
    assert not twins.optimizer.state
    for _ in range(3):
        twins.step_clipped(0.1)
        assert not twins.optimizer.skipped
    twins.agree()
    assert twins.optimizer.skipped_steps == 1


def test_a_first_step_without_a_scale_counts_nothing() -> None:
    twins = Twins(Mine, loss_scale=LossScale.none())
    twins.step([torch.full_like(p, float("nan")) for p in twins.mine])
    assert not twins.optimizer.skipped
    assert twins.optimizer.skipped_steps == 0


def test_what_is_reported_is_of_the_last_step() -> None:
    """Though some steps run compiled, some op by op, and each pattern has its own."""
    twins = Twins(Mine)
    only = [True, False, False]
    patterns = [only, only, [True, True, False], only]
    for pattern in patterns:
        twins.step([torch.randn_like(p) if on else None
                    for p, on in zip(twins.mine, pattern, strict=True)])  # fmt: skip
        assert not twins.optimizer.skipped
    twins.give([torch.full((3, 4), float("inf")), None, None])
    twins.optimizer.step()
    assert twins.optimizer.skipped


class OldStyle(Mine):
    """As in many papers' code: `.data`, and the gradient itself for scratch."""

    def step(self, closure: Any = None) -> None:  # no torch.no_grad
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
                grad.add_(p.data, alpha=0.1)
                state = self.state[p]
                if len(state) == 0:
                    state["m"] = torch.zeros_like(p.data)
                state["m"].mul_(group["beta"]).add_(grad)
                p.data.add_(state["m"], alpha=-group["lr"])


@pytest.mark.slow_rows("trains with several optimizers")
@pytest.mark.parametrize("emit", ["eager", "inductor"])
@pytest.mark.parametrize("max_grad_norm", [None, 1e6])
def test_a_step_that_works_on_data_and_in_the_gradient(
    max_grad_norm: float | None, emit: str
) -> None:
    twins = Twins(OldStyle, max_grad_norm=max_grad_norm, emit=emit)
    twins.train(4)
    assert twins.optimizer.compilations == 1


class ByLists(AsWritten):
    """Multi-tensor operators of its own, each over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            moved = torch._foreach_mul([p.grad for p in params], group["lr"])
            torch._foreach_sub_(params, moved)


def test_a_step_over_lists_of_parameters() -> None:
    twins = Twins(ByLists)
    for kept in ((1, 1, 1), (1, 0, 1), (1, 1, 1)):
        twins.step(
            [torch.randn_like(p) if k else None for p, k in zip(twins.mine, kept, strict=True)]
        )
    twins.agree()
    assert (twins.optimizer.left, twins.optimizer.compilations) == (None, 2)


class Shrinking(Adam):
    """Adam, and something before it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9)
        return super().step(closure)


def test_a_step_that_calls_its_bases() -> None:
    """Which torch wrapped in hooks and a profiler range when first it made one."""
    Adam([nn.Parameter(torch.ones(1))])
    twins = Twins(functools.partial(Shrinking, lr=0.1))
    calls: list[Any] = []
    twins.optimizer._inner.register_step_pre_hook(lambda *_: calls.append(_))
    twins.train()
    assert len(calls) == 3
    assert twins.optimizer.compilations == 1
    assert Adam.step.hooked  # type: ignore[attr-defined]  # put back


class Unlike(Optimizer):
    """Other names for its settings, an `_init_group` of its own, and no closure."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {"size": 0.1, "weights": [1.0, 2.0], **settings})
        self.boost = 1.0

    def _init_group(self) -> None:
        self.started = True

    @torch.no_grad()
    def step(self) -> None:
        self._init_group()
        for group in self.param_groups:
            size = group["size"] if group.get("lr") is None else group["lr"]
            for p in group["params"]:
                p.sub_(p.grad * (size * self.boost * group["weights"][1]))


@pytest.mark.parametrize("settings", [{}, {"lr": None}, {"lr": 0.3}])
def test_settings_of_any_name(settings: dict[str, Any]) -> None:
    twins = Twins(functools.partial(Unlike, **settings))
    twins.train()


class MatricesAlone(Unlike):
    """Leaves vectors and numbers as they are."""

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            if p.dim() > 1:
                p.sub_(p.grad, alpha=0.1)


@pytest.mark.slow_rows("Inductor")
@pytest.mark.parametrize("emit", ["eager", "inductor"])
def test_parameters_that_it_leaves_alone(emit: str) -> None:
    Twins(MatricesAlone, emit=emit).train()


def test_settings_changed_in_place_and_attributes_are_honoured() -> None:
    twins = Twins(Unlike)
    for step in range(3):
        twins.step()
        for optimizer in (twins.reference, twins.optimizer._inner):
            optimizer.param_groups[0]["weights"][1] += 1
            optimizer.boost = 2.0 + step
    twins.step()
    twins.agree()


def test_a_learning_rate_kept_in_the_state() -> None:
    class Remembers(Mine):
        def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
            state.setdefault("last", torch.zeros((), dtype=torch.float64))
            state["last"].copy_(torch.as_tensor(group["lr"]))
            p.sub_(p.grad, alpha=0.1)  # type: ignore[arg-type]

    for scale in (None, LossScale.none()):
        twins = Twins(Remembers, loss_scale=scale)
        for _ in range(3):
            twins.step()
            for optimizer in twins.both:
                optimizer.param_groups[0]["lr"] *= 0.5
        twins.agree()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_count_read_as_a_number(dtype: torch.dtype) -> None:
    """It stays on the device, and as wide as Python's number: in FP32, `1 - 0.9999` keeps 4 digits
    (of 2^-24 / 1e-4, half an ulp of 1 over the difference).
    """

    class ReadsItsCount(AsWritten):
        def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
            count = state.setdefault("step", torch.zeros((), dtype=dtype))
            count += 1
            assert p.grad is not None
            p.sub_(p.grad * (1e-3 * group["lr"] / (1 - 0.9999 ** count.item())))

    twins = Twins(ReadsItsCount)
    twins.train(3)
    assert (twins.optimizer.left, twins.optimizer.compilations) == (None, 1)


class Averaged(SGD):
    """Swaps its parameters for their average in evaluation, as schedule-free optimizers do."""

    def eval(self) -> None:
        self._swap(training=False)

    def train(self) -> None:
        self._swap(training=True)

    @torch.no_grad()
    def _swap(self, *, training: bool) -> None:
        for group in self.param_groups:
            if group.get("training", True) is not training:
                for p in group["params"]:
                    p.lerp_(self.state[p]["momentum_buffer"], -1.0 if training else 0.5)
            group["training"] = training


def test_train_and_eval_are_handed_on() -> None:
    twins = Twins(functools.partial(Averaged, lr=0.1, momentum=0.9))
    twins.step()
    twins.step()
    trained = [p.detach().clone() for p in twins.mine]
    for optimizer in twins.both:
        optimizer.eval()  # type: ignore[attr-defined]
    twins.agree()
    assert not any(torch.equal(p, q) for p, q in zip(twins.mine, trained, strict=True))
    for optimizer in twins.both:
        optimizer.train()  # type: ignore[attr-defined]
    twins.step()
    twins.agree()


def test_only_an_optimizer_that_has_them_has_train_and_eval() -> None:
    optimizer = MPOptimizer(SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    assert not hasattr(optimizer, "train")
    with pytest.raises(AttributeError, match="'SGD' object has no attribute 'eval'"):
        optimizer.eval()


# -- bad arguments ----------------------------------------------------------------------------


def sgd(**settings: Any) -> SGD:
    return SGD([nn.Parameter(torch.ones(2))], lr=0.1, **settings)


COMPLEX = nn.Parameter(torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MPOptimizer(nn.Linear(2, 2)), r"MPOptimizer\(Linear\): give a torch.optim opti"),
        (lambda: MPOptimizer([nn.Parameter(torch.ones(2))]), r"MPOptimizer\(list\): give a torch"),
        (lambda: MPOptimizer(sgd(differentiable=True)), r"SGD\(differentiable=True\) can't be"),
        (lambda: MPOptimizer(SGD([COMPLEX])), "SGD holds complex parameters; use it as it is"),
        (lambda: MPOptimizer(sgd(), max_grad_norm=-1), r"=-1\): must be a positive number"),
        (lambda: MPOptimizer(sgd(), max_grad_norm=float("nan")), "must be a positive number"),
        (lambda: MPOptimizer(sgd(), max_grad_norm="1"), "must be a positive number"),
        (lambda: MPOptimizer(sgd(), mode="fastest"), "Unrecognized mode=fastest"),
        (lambda: MPOptimizer(sgd(), options={"nonsense": 1}), "optimization option nonsense"),
        (lambda: MPOptimizer(sgd(), options=["trace"]), r"=\['trace'\]\): give a dict of Inductor"),
        (lambda: MPOptimizer(sgd(), emit="triton"), r"\(emit='triton'\): use inductor, aot_eager"),
        (lambda: MPOptimizer(sgd(), emit="eager", mode="max-autotune"),
         r"\(mode='max-autotune'\) is Inductor's; it means nothing to eager"),
    ],
)  # fmt: skip
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(MPCompileError, match=message):
        make()


def test_a_bad_param_group_is_not_added() -> None:
    optimizer = MPOptimizer(sgd(), emit="eager")
    with pytest.raises(MPCompileError, match="complex"):
        optimizer.add_param_group({"params": [COMPLEX]})
    with pytest.raises(MPCompileError, match="differentiable"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "differentiable": True})
    assert len(optimizer.param_groups) == 1


def test_it_says_what_it_is() -> None:
    assert repr(MPOptimizer(sgd())).startswith("MPOptimizer(SGD (")
    assert isinstance(MPOptimizer(sgd()), Optimizer)
