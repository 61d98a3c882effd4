"""What a user changes between two calls of a whole training step."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from whole_steps import BOTH, O1, O1_MP, SETTINGS, Run, Setting, agree, agree_left, batches

pytestmark = pytest.mark.slow("compiles whole steps of several kinds, against FP64")

Step = Callable[..., Any]
Do = Callable[[Any, Any, dict[str, Any]], object]
"""Of the model, the optimizer, and what is kept from one time to the next: at first the scale."""


def program(changes: dict[int, Do]) -> Callable[[Run], Step]:
    """What is done before which call."""

    def build(run: Run) -> Step:
        model, optimizer, loss_of = run.classifier()
        kept: dict[str, Any] = {"scale": run.scale}
        for call, do in changes.items():
            run.before[call] = functools.partial(do, model, optimizer, kept)
        return run.usual(loss_of, optimizer)

    return build


def setting_of(**new: Any) -> Do:
    return lambda m, o, k: o.param_groups[0].update(new)


CHANGES: dict[str, tuple[int, dict[int, Do]]] = {
    "frozen and thawed": (2, {
        2: lambda m, o, k: m[0].requires_grad_(False),
        4: lambda m, o, k: m[0].requires_grad_(True),
    }),
    "clamped outside": (1, {
        2: lambda m, o, k: [p.data.clamp_(-0.05, 0.05) for p in m.parameters()],
    }),
    "the model loaded": (1, {
        0: lambda m, o, k: k.update(model=copy.deepcopy(m.state_dict())),
        2: lambda m, o, k: m.load_state_dict(k["model"]),
    }),
    "the optimizer loaded": (2, {
        2: lambda m, o, k: k.update(optimizer=copy.deepcopy(o.state_dict())),
        4: lambda m, o, k: o.load_state_dict(k["optimizer"]),
    }),
    "another momentum": (2, {2: setting_of(momentum=0.5)}),
    "another decay": (2, {2: setting_of(weight_decay=0.1)}),
    "maximized": (2, {2: setting_of(maximize=True)}),
    "the state cleared": (2, {2: lambda m, o, k: o.state.clear()}),
    "moved in memory": (2, {
        2: lambda m, o, k: [setattr(p, "data", p.data.clone()) for p in m.parameters()],
    }),
    "momentum by hand": (2, {
        2: lambda m, o, k: [
            o.state[p].update(momentum_buffer=torch.ones_like(p)) for p in m.parameters()
        ],
    }),
    "another scale": (1, {
        0: lambda m, o, k: k.update(before=k["scale"].state_dict()),
        2: lambda m, o, k: k["scale"].load_state_dict({**k["before"], "scale": 64.0}),
    }),
    "evaluated": (1, {2: lambda m, o, k: [m.eval(), m(torch.ones(2, 16)), m.train()]}),
    "a hook removed": (1, {
        2: lambda m, o, k: k.update(hook=m[0].weight.register_hook(lambda g: g * 0.5)),
        4: lambda m, o, k: k["hook"].remove(),
    }),
}  # fmt: skip
"""How many graphs are made, and what is done."""


@pytest.mark.sampled(3)
@SETTINGS
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_calls(setting: Setting, name: str) -> None:
    if name == "another scale" and setting.dtype is torch.bfloat16:
        pytest.skip("BF16 has no scale")
    compiled, changes = CHANGES[name]
    agree(program(changes), batches(6), setting, compiled=compiled)


@BOTH
def test_a_gradient_of_the_users_own_is_added_to(setting: Setting) -> None:
    def backward(model: nn.Sequential, optimizer: Any, kept: Any) -> None:
        for p in model.parameters():
            p.grad = torch.ones_like(p) * 0.1

    if setting.level == "O2":  # in pieces, p.grad would be scaled there
        setting = O1_MP
    agree(program({2: backward}), batches(5), setting, compiled=2)


@BOTH
def test_a_parameter_is_replaced(setting: Setting) -> None:
    def new(model: nn.Sequential, optimizer: Any, kept: Any) -> None:
        torch.manual_seed(7)
        model[2] = nn.Linear(32, 8)
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})

    agree(program({2: new}), batches(5), setting, compiled=2)


@pytest.mark.parametrize("setting", [O1, O1_MP], ids=str)
def test_a_step_hook_runs(setting: Setting) -> None:
    ran = []

    def hooked(model: Any, optimizer: Any, kept: dict[str, Any]) -> None:
        optimizer.register_step_post_hook(lambda *_: ran.append(id(kept)))

    agree_left(program({2: hooked}), batches(5), setting, "step hooks")
    assert sorted(map(ran.count, {*ran})) == [3, 3]  # as a whole, and in pieces
