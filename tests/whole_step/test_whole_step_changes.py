"""What a user changes between two calls of a whole training step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from whole_steps import BOTH, O1, O1_MP, SETTINGS, Run, Setting, agree, agree_left, batches

pytestmark = pytest.mark.slow("compiles whole steps of several kinds, against FP64")

Step = Callable[..., Any]
Change = Callable[[Run, nn.Sequential, torch.optim.Optimizer], Any]


def program(change: Change) -> Callable[[Run], Step]:
    def build(run: Run) -> Step:
        model, optimizer, loss_of = run.classifier()
        change(run, model, optimizer)
        return run.usual(loss_of, optimizer)

    return build


def freeze(run: Run, model: nn.Sequential, optimizer: Any) -> None:
    run.before[2] = lambda: model[0].requires_grad_(False)
    run.before[4] = lambda: model[0].requires_grad_(True)


def clamp_outside(run: Run, model: nn.Sequential, optimizer: Any) -> None:
    run.before[2] = lambda: [p.data.clamp_(-0.05, 0.05) for p in model.parameters()]


def load_model(run: Run, model: nn.Sequential, optimizer: Any) -> None:
    saved = copy.deepcopy(model.state_dict())
    run.before[2] = lambda: model.load_state_dict(saved)


def load_optimizer(run: Run, model: nn.Sequential, optimizer: Any) -> None:
    saved: list[Any] = []
    run.before[2] = lambda: saved.append(copy.deepcopy(optimizer.state_dict()))
    run.before[4] = lambda: optimizer.load_state_dict(saved[0])


def change_momentum(run: Run, model: nn.Sequential, optimizer: Any) -> None:
    run.before[2] = lambda: optimizer.param_groups[0].update(momentum=0.5)


def change_decay(run: Run, model: nn.Sequential, optimizer: Any) -> None:
    run.before[2] = lambda: optimizer.param_groups[0].update(weight_decay=0.1)


def maximize(run: Run, model: nn.Sequential, optimizer: Any) -> None:
    run.before[2] = lambda: optimizer.param_groups[0].update(maximize=True)


def clear_state(run: Run, model: nn.Sequential, optimizer: Any) -> None:
    run.before[2] = lambda: optimizer.state.clear()


def move_memory(run: Run, model: nn.Sequential, optimizer: Any) -> None:
    def move() -> None:
        for p in model.parameters():
            p.data = p.data.clone()

    run.before[2] = move


def momentum_by_hand(run: Run, model: nn.Sequential, optimizer: Any) -> None:
    def new() -> None:
        for p in model.parameters():
            optimizer.state[p]["momentum_buffer"] = torch.ones_like(p)

    run.before[2] = new


def another_scale(run: Run, model: nn.Sequential, optimizer: Any) -> None:
    saved = run.scale.state_dict()
    run.before[2] = lambda: run.scale.load_state_dict({**saved, "scale": 64.0})


def evaluate(run: Run, model: nn.Sequential, optimizer: Any) -> None:
    run.before[2] = lambda: [model.eval(), model(torch.ones(2, 16)), model.train()]


def hook_removed(run: Run, model: nn.Sequential, optimizer: Any) -> None:
    handles: list[Any] = []
    run.before[2] = lambda: handles.append(model[0].weight.register_hook(lambda g: g * 0.5))
    run.before[4] = lambda: handles.pop().remove()


CHANGES: dict[Change, int] = {
    freeze: 2, clamp_outside: 1, load_model: 1, load_optimizer: 2, change_momentum: 2,
    change_decay: 2, maximize: 2, clear_state: 2, move_memory: 2, momentum_by_hand: 2,
    another_scale: 1, evaluate: 1, hook_removed: 1,
}  # fmt: skip


@pytest.mark.sampled(3)
@SETTINGS
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_a_change_between_calls(setting: Setting, change: Change) -> None:
    if change is another_scale and setting.dtype is torch.bfloat16:
        pytest.skip("BF16 has no scale")
    agree(program(change), batches(6), setting, compiled=CHANGES[change])


@BOTH
def test_a_gradient_of_the_users_own_is_added_to(setting: Setting) -> None:
    def own_gradient(run: Run, model: nn.Sequential, optimizer: Any) -> None:
        def backward() -> None:
            for p in model.parameters():
                p.grad = torch.ones_like(p) * 0.1

        run.before[2] = backward

    if setting.level == "O2":  # in pieces, p.grad would be scaled there
        setting = O1_MP
    agree(program(own_gradient), batches(5), setting, compiled=2)


@BOTH
def test_a_parameter_is_replaced(setting: Setting) -> None:
    def replace(run: Run, model: nn.Sequential, optimizer: Any) -> None:
        def new() -> None:
            torch.manual_seed(7)
            model[2] = nn.Linear(32, 8)
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})

        run.before[2] = new

    agree(program(replace), batches(5), setting, compiled=2)


@pytest.mark.parametrize("setting", [O1, O1_MP], ids=str)
def test_a_step_hook_runs(setting: Setting) -> None:
    ran = []

    def hooked(run: Run, model: nn.Sequential, optimizer: Any) -> None:
        run.before[2] = lambda: optimizer.register_step_post_hook(lambda *_: ran.append(run.whole))

    agree_left(program(hooked), batches(5), setting, "step hooks")
    assert ran.count(True) == ran.count(False) == 3
