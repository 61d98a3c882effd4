"""What is known of parameters and optimizers: one state for each, and hooks that wait for us."""

import gc
import weakref

import pytest
import torch
from processes import python
from torch import nn

from mpcompile import LossScale, MPOptimizer
from mpcompile.scaling import copies, guard, parameters


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2, 3))


def owner(*params: nn.Parameter) -> MPOptimizer:
    return MPOptimizer(torch.optim.SGD(params, lr=0.1), emit="eager")


# -- parameters -----------------------------------------------------------------------------------


def test_nothing_is_known_of_a_tensor_until_something_is_noted() -> None:
    x = torch.ones(2)
    assert parameters.state_of(x) == parameters.ParamState()
    assert (parameters.owner_of(x), parameters.scales_of(x)) == (None, ())
    assert not vars(x)
    known, params = parameters.Derived(), [weight() for _ in range(50)]
    for p in params:
        known.note([p], "derived")
    del params, p  # new ones lie in their places
    assert {known.of([p]) for p in [weight() for _ in range(50)]} == {None}


def test_one_count_grows_with_each_fact_and_only_then() -> None:
    p, scale, other = weight(), LossScale.static(2.0), LossScale.static(4.0)
    counts = [parameters.changes()]

    def grew() -> bool:
        counts.append(parameters.changes())
        return counts[-1] > counts[-2]

    optimizer = owner(p)
    assert grew()
    parameters.own([p], optimizer)
    assert not grew()
    parameters.own([p], optimizer, scale)
    assert grew()
    guard.watch([p], scale)
    assert grew()
    guard.watch([p], scale)
    assert not grew()
    guard.watch([p], other)
    assert grew()
    kept = copies.copy_of(p, torch.float16)
    assert grew()
    assert copies.copy_of(p, torch.float16) is kept
    assert not grew()
    copies.read_in_full([p])
    assert grew()
    copies.read_in_full([p])
    assert not grew()
    assert parameters.state_of(p) == parameters.ParamState(
        weakref.ref(optimizer), scale, {torch.float16: kept}, True, (scale, other)
    )


@pytest.mark.slow("trainings that overflow, against FP64")
def test_what_is_known_goes_with_the_parameter_and_its_optimizer() -> None:
    p, scale = weight(), LossScale.static(2.0)
    optimizer = owner(p)
    guard.watch([p], scale)
    copies.copy_of(p, torch.float16)
    its_state, of_optimizer = parameters.state_of(p), parameters.of_optimizer(optimizer)
    gone = [weakref.ref(x) for x in (optimizer, of_optimizer, its_state, p)]
    del optimizer, of_optimizer, its_state
    gc.collect()
    assert gone[0]() is gone[1]() is None
    assert parameters.owner_of(p) is None
    assert parameters.scales_of(p) == (scale,)
    del p
    gc.collect()
    assert gone[2]() is gone[3]() is None


@pytest.mark.slow("trainings that overflow, against FP64")
def test_a_given_scale_is_that_of_a_living_optimizer() -> None:
    p, scale = weight(), LossScale.static(2.0)
    optimizer = MPOptimizer(torch.optim.SGD([p], lr=0.1), loss_scale=scale, emit="eager")
    assert parameters.given_scale([weight(), p]) is scale
    del optimizer
    gc.collect()
    assert parameters.given_scale([p]) is None


# -- torch's step hooks ---------------------------------------------------------------------------

COUNT_HOOKS = """
import torch
from torch.optim import optimizer as torchs

def count():
    before, after = torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks
    modules = [[hook.__module__ for hook in hooks.values()] for hooks in (before, after)]
    return [sum("mpcompile.scaling" in name for name in names) for names in modules]

import mpcompile
from mpcompile.scaling import copies, guard, hooks, low_gradients
assert count() == [0, 0], "importing registers a hook"
for _ in range(2):
    {compile}
    assert count() == [1, 1]
"""


@pytest.mark.slow("trainings that overflow, against FP64")
@pytest.mark.parametrize(
    "compile_",
    [
        "mpcompile.mpcompile(torch.nn.Linear(2, 2), dtype=torch.float16)",
        "torch.compile(torch.nn.Linear(2, 2), backend='mpcompile')",
    ],
)
def test_torch_is_hooked_once_something_may_be_compiled_and_not_before(compile_: str) -> None:
    python("-c", COUNT_HOOKS.format(compile=compile_))


ENDS = """
import torch
from mpcompile.scaling import parameters

class Owner:
    pass

weight = torch.nn.Parameter(torch.zeros(2))
owner = Owner()
parameters.own([weight], owner)
for name in list(vars(parameters)):
    setattr(parameters, name, None)
del owner
"""


@pytest.mark.slow("trainings that overflow, against FP64")
def test_nothing_is_printed_where_an_optimizer_outlives_the_globals() -> None:
    """When Python ends, it sets the globals of modules to None before the last objects go."""
    assert not python("-c", ENDS).stderr
