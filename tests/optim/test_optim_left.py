"""Optimizers whose step can't be compiled: it runs as it is, between the same checks."""

import copy
import importlib
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_written import AsWritten
from torch import nn
from torch.optim import Optimizer
from twins import Twins

from mpcompile import MPCompileError, MPCompileWarning, MPOptimizer, loss_scale_of, mpcompile


class CountsInState(AsWritten):
    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        p.sub_(p.grad, alpha=group["lr"] / state["step"])  # type: ignore[arg-type]


class CountsInGroup(AsWritten):
    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1
        p.sub_(p.grad, alpha=group["lr"] / group["step"])  # type: ignore[arg-type]


class CountsInItself(AsWritten):
    count = 0

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        self.count += 1
        p.sub_(p.grad, alpha=group["lr"] / self.count)  # type: ignore[arg-type]


class CountsInADict(AsWritten):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.seen = {"steps": [0]}

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        self.seen["steps"][0] += 1
        p.sub_(p.grad, alpha=group["lr"] / self.seen["steps"][0])  # type: ignore[arg-type]


class Branches(AsWritten):
    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        if p.grad.norm() > 1:
            p.sub_(p.grad, alpha=group["lr"])


class BranchesOnItem(AsWritten):
    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        if p.grad.norm().item() > 1:
            p.sub_(p.grad, alpha=group["lr"])


class Rounds(AsWritten):
    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=float(int(p.grad.abs().max()) + 1))


class Shares(AsWritten):
    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        everyone = self.state["everyone"]
        everyone["n"] = everyone.get("n", torch.zeros(())) + 1
        p.sub_(p.grad / everyone["n"], alpha=group["lr"])  # type: ignore[operator]


class Holds(AsWritten):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.factor = torch.tensor(0.1)

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        p.sub_(p.grad * self.factor)  # type: ignore[operator]


class Grows(AsWritten):
    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        past = state.get("past")
        state["past"] = p.grad[None] if past is None else torch.cat([past, p.grad[None]])
        p.sub_(state["past"].mean(0), alpha=group["lr"])


class CountsInAnObject(AsWritten):
    class Clock:
        ticks = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.clock = self.Clock()
        self.clock.ticks = 0

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        self.clock.ticks += 1
        p.sub_(p.grad * group["lr"] / self.clock.ticks)  # type: ignore[operator]


class DrawsNumbers(AsWritten):
    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        p.sub_(p.grad * (group["lr"] * random.Random(0).random() + 0 * random.random()))  # type: ignore[operator]


class Knows(AsWritten):
    """Tells its parameters by themselves: the last one is updated faster."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.fast = {self.param_groups[-1]["params"][-1]}

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"] * (3 if p in self.fast else 1))  # type: ignore[arg-type]


class KnowsIds(AsWritten):
    """Likewise, by numbers in a table."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rates = {"by id": {id(self.param_groups[-1]["params"][-1]): 3}}

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"] * self.rates["by id"].get(id(p), 1))  # type: ignore[arg-type]


_COUNTS = "as a Python value and changes it in every step"
_BRANCHES = "it branches on the value of a tensor, or makes a Python number of it"
# The class -> why its step can't be compiled.
WHY: dict[type[Optimizer], str] = {
    CountsInState: f"the entry of its state 'step' {_COUNTS}",
    CountsInGroup: f"the setting of its param group 'step' {_COUNTS}",
    CountsInItself: f"the attribute 'count' {_COUNTS}",
    CountsInADict: f"the attribute 'seen' {_COUNTS}",
    CountsInAnObject: f"the attribute 'clock' with 'ticks' {_COUNTS}",
    DrawsNumbers: "it draws from `random`, in every step again",
    Branches: _BRANCHES,
    BranchesOnItem: _BRANCHES,
    Rounds: _BRANCHES,
    Shares: "it keeps state that belongs to no parameter of this step ('everyone')",
    Holds: "FakeTensor",
    Knows: "it keeps parameters of its own in 'fast'",
    KnowsIds: "it keeps parameters of its own in 'rates'",
    Grows: "it changes the shape of its state 'past'",
}
LEFT = pytest.mark.parametrize("cls", WHY)


@LEFT
def test_it_says_why_and_goes_on_as_the_optimizer_does(cls: type[Optimizer]) -> None:
    twins = Twins(cls)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            twins.step()
    assert WHY[cls] in twins.optimizer.left
    (one,) = said
    assert one.category is MPCompileWarning
    begins = f"MPOptimizer: the step of {cls.__name__} can't be compiled: {twins.optimizer.left}"
    assert str(one.message).startswith(begins)
    assert twins.optimizer.compilations == 0
    twins.agree(rtol=0, atol=0)
    assert twins.optimizer.memory()["masters"] == 4
    assert (
        twins.optimizer.state_dict()["param_groups"] == twins.reference.state_dict()["param_groups"]
    )


@LEFT
@pytest.mark.filterwarnings("ignore:MPOptimizer. the step of")
def test_a_skipped_step_changes_nothing(cls: type[Optimizer]) -> None:
    twins = Twins(cls)
    for good in (False, True, True, False, True, False):
        if good:
            twins.step()
            assert not twins.optimizer.skipped
            continue
        before = known(twins.optimizer.inner)
        twins.give([torch.full_like(p, float("inf")) for p in twins.mine])
        twins.optimizer.step()
        assert twins.optimizer.skipped
        torch.testing.assert_close(known(twins.optimizer.inner), before, rtol=0, atol=0)
    twins.agree(rtol=0, atol=0)
    assert twins.optimizer.skipped_steps == 3


def known(optimizer: Optimizer) -> dict[str, Any]:
    """Copies of all that a step may change."""
    own = {k: v for k, v in vars(optimizer).items() if k in ("count", "seen", "factor")}
    groups = [dict(group) for group in optimizer.param_groups]
    state = [(str(k) if isinstance(k, str) else "", dict(v)) for k, v in optimizer.state.items()]
    return copy.deepcopy({"own": own, "groups": groups, "state": [v for _, v in state if v]})


@pytest.mark.filterwarnings("ignore:MPOptimizer. the step of")
def test_gradients_are_clipped_and_the_norm_is_reported() -> None:
    twins = Twins(CountsInGroup, max_grad_norm=0.1)
    for _ in range(4):
        twins.step_clipped(0.1)
    twins.agree()


@pytest.mark.filterwarnings("ignore:MPOptimizer. the step of")
@pytest.mark.parametrize("cls", [CountsInState, CountsInGroup])
def test_a_saved_state_goes_on_counting(cls: type[Optimizer]) -> None:
    """Also into the plain optimizer, and from it."""
    twins = Twins(cls)
    for _ in range(3):
        twins.step()
    state = copy.deepcopy(twins.optimizer.state_dict())
    ours = MPOptimizer(cls(twins.mine), emit="eager")
    ours.load_state_dict(state)
    theirs = cls(twins.theirs)
    theirs.load_state_dict({k: v for k, v in state.items() if k != "loss_scale"})
    for _ in range(2):
        twins.give()
        ours.step()
        theirs.step()
    torch.testing.assert_close(twins.mine, twins.theirs, rtol=0, atol=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.filterwarnings("ignore:MPOptimizer. the step of")
def test_a_model_in_fp16_trains_as_with_true_gradients(level: str) -> None:
    """Its gradients are scaled at O2, and O2 reads copies, which follow such a step, too."""
    check_training(CountsInGroup, level)


class InOneMemory(Optimizer):
    """It steps on one vector, of which the parameters show parts."""

    def __init__(self, params: list[nn.Parameter], lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0
        self.flat = torch.cat([p.detach().reshape(-1) for p in params])
        for p, part in zip(params, self.flat.split([p.numel() for p in params]), strict=True):
            p.data = part.view_as(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        (group,) = self.param_groups
        grads = [p.grad.reshape(-1) for p in group["params"]]
        self.flat.sub_(torch.cat(grads), alpha=group["lr"] / self.steps)


@pytest.mark.filterwarnings("ignore:MPOptimizer. the step of")
def test_copies_follow_a_step_on_other_tensors_over_the_same_memory() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = mpcompile(net, dtype=torch.bfloat16, level="O2", emit="eager")
    optimizer = MPOptimizer(InOneMemory(list(net.parameters())), emit="eager")
    x = torch.randn(32, 8)
    for _ in range(4):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted = copy.deepcopy(net).double()(x.double())
        torch.testing.assert_close(model(x).double(), wanted, rtol=0, atol=0.02)
    assert optimizer.left is not None


def check_training(make: Callable[[list[nn.Parameter]], Optimizer], level: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    twin = copy.deepcopy(net)
    # A power of two: dividing by it is exact.
    model = mpcompile(net, dtype=torch.float16, level=level, emit="eager", loss_scale=1024.0)
    optimizer = MPOptimizer(make(list(net.parameters())), emit="eager")
    reference = make(list(twin.parameters()))
    for one in (optimizer, reference):
        getattr(one, "train", lambda: None)()
    for step in range(6):
        x = torch.randn(32, 8)
        if step in (0, 3):
            before = known(optimizer.inner)
            model(x * float("inf")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(known(optimizer.inner), before, rtol=0, atol=0)
        model(x).square().mean().backward()
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=0)
    assert optimizer.left is not None
    assert optimizer.compilations == 0
    assert loss_scale_of(model).skipped_steps == 2


# Packages' optimizers that count in Python numbers, or branch on the value of a tensor.
PUBLISHED = {
    "AdamWScheduleFree": ("schedulefree", {"lr": 0.01}),
    "SGDScheduleFree": ("schedulefree", {"lr": 0.01}),
    "Prodigy": ("prodigyopt", {}),
    "AdaBelief": ("torch_optimizer", {"lr": 0.01}),
    "Lamb": ("torch_optimizer", {"lr": 0.01}),
    "Shampoo": ("torch_optimizer", {"lr": 0.01}),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:MPOptimizer. the step of")
@pytest.mark.filterwarnings("ignore:This overload")  # they call functions that torch gave up
def test_published_optimizers_train(name: str) -> None:
    package, settings = PUBLISHED[name]
    pytest.importorskip(package)
    cls = getattr(importlib.import_module(package), name)
    check_training(lambda params: cls(params, **settings), "O2")


def test_an_error_of_its_own_comes_up() -> None:
    """Schedule-free optimizers want to be told that they train: nothing is left for that."""

    class Refuses(AsWritten):
        ready = False

        def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
            if not self.ready:
                raise ValueError("call train() first")
            p.sub_(p.grad * group["lr"])  # type: ignore[operator]

    twins = Twins(Refuses)
    twins.give()
    with pytest.raises(ValueError, match="call train"):
        twins.optimizer.step()
    twins.optimizer.inner.ready = twins.reference.ready = True  # type: ignore[attr-defined]
    for _ in range(3):  # a warning would be an error here
        twins.step()
    assert twins.optimizer.compilations == 1
    assert twins.optimizer.left is None
    twins.agree()


def test_wrappers_and_closures_are_refused_still() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    with pytest.raises(MPCompileError, match="runs its closure several times"):
        MPOptimizer(torch.optim.LBFGS(parameters))
    with pytest.raises(MPCompileError, match="wants sparse gradients"):
        MPOptimizer(torch.optim.SparseAdam(parameters))
