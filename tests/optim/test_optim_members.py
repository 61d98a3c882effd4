"""Whether a step is like the one before: what the facts of `optim/rests_on.py` notice."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from mpcompile import MPOptimizer
from mpcompile.optim.rests_on import Gradients

Params = list[nn.Parameter]


def optimizer() -> torch.optim.Optimizer:
    shapes = ((3, 2), (3, 2), (4,), (0,), (1,))
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    for p in (*params[:2], params[3], params[4]):  # the third has no gradient
        p.grad = torch.ones_like(p)
    return torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)


def params_of(optimizer: torch.optim.Optimizer) -> Params:
    return [p for group in optimizer.param_groups for p in group["params"]]


def lose_one(o: torch.optim.Optimizer) -> None:
    params_of(o)[0].grad = None


def get_one(o: torch.optim.Optimizer) -> None:
    params_of(o)[2].grad = torch.ones(4)


def transpose(o: torch.optim.Optimizer) -> None:
    params_of(o)[0].grad = torch.ones(2, 3).t()


def narrow(o: torch.optim.Optimizer) -> None:
    p = params_of(o)[0]
    p.grad = None
    p.grad_dtype = torch.float16
    p.grad = torch.ones(3, 2).half()


def make_sparse(o: torch.optim.Optimizer) -> None:
    params_of(o)[0].grad = torch.ones(3, 2).to_sparse()


def replace_by_an_equal_one(o: torch.optim.Optimizer) -> None:
    one = params_of(o)[4]
    o.param_groups[1]["params"][2] = other = nn.Parameter(one.detach().clone())
    other.grad = one.grad


def swap(o: torch.optim.Optimizer) -> None:
    o.param_groups[0]["params"].reverse()


def move_to_the_other_group(o: torch.optim.Optimizer) -> None:
    o.param_groups[1]["params"].insert(0, o.param_groups[0]["params"].pop())


def get_elements(o: torch.optim.Optimizer) -> None:
    p = params_of(o)[3]
    p.grad = None
    p.data = torch.ones(2)
    p.grad = torch.ones(2)


def add_a_group(o: torch.optim.Optimizer) -> None:
    o.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


CHANGES = (lose_one, get_one, transpose, narrow, make_sparse, replace_by_an_equal_one, swap,
           move_to_the_other_group, get_elements, add_a_group)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_a_pattern_notices(change: Callable[[torch.optim.Optimizer], None]) -> None:
    own = optimizer()
    pattern = Gradients(own)
    assert pattern.holds(own)
    change(own)
    assert not pattern.holds(own)


def test_a_pattern_holds_for_new_gradients_stored_alike() -> None:
    own = optimizer()
    pattern = Gradients(own)
    for p in params_of(own):
        if p.grad is not None:
            p.grad = p.grad.clone() + 1
    assert pattern.holds(own)


def test_the_gradient_of_a_parameter_without_elements_does_not_count() -> None:
    own = optimizer()
    empty = params_of(own)[3]
    empty.grad = torch.ones(0).to_sparse()
    pattern = Gradients(own)
    empty.grad = torch.ones(0)
    assert pattern.holds(own)


@pytest.mark.slow("trains with several optimizers")
def test_a_parameter_that_has_become_smaller_is_no_longer_taken_for_the_larger_one() -> None:
    """It lies at the same address, with the same strides. Its moments are too large for it now, so
    that torch's own step is an error as well.
    """
    p = nn.Parameter(torch.ones(6, 2))
    ours = MPOptimizer(torch.optim.AdamW([p], lr=0.1))
    p.grad = torch.ones(6, 2)
    ours.step()
    p.grad = None
    p.data = p.data[:4]
    p.grad = torch.ones(4, 2)
    with pytest.raises(RuntimeError, match="size of tensor"):
        ours.step()
