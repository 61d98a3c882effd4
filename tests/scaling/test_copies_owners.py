"""O2's working copies: when a model gets and loses them, and what its owner sees of them."""

import copy
import gc
import pickle

import pytest
import torch
from copied_models import Net, Tied, check_against_fp64, dtype_of, one_step, trained
from torch import nn

from mpcompile import MPOptimizer, mpcompile
from mpcompile.scaling.copies import MasterWeight


def test_an_optimizer_made_after_the_first_forward_is_noticed() -> None:
    model = mpcompile(Net(), level="O2", dtype=torch.bfloat16, emit="eager")
    model(torch.randn(4, 8)).mean().backward()
    model.zero_grad()
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), emit="eager")
    model(torch.randn(4, 8)).mean().backward()
    assert model.fc1.weight.grad.dtype is torch.bfloat16  # type: ignore[union-attr]
    optimizer.step()


@pytest.mark.slow("trainings that overflow, against FP64")
def test_without_its_optimizer_a_model_gives_true_gradients_again() -> None:
    model, optimizer = trained(Net())
    one_step(model, optimizer)
    del optimizer
    gc.collect()
    check_against_fp64(
        model, lambda net: net(torch.ones(4, 8, dtype=dtype_of(net))).sum().backward()
    )
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
    torch.optim.AdamW(model.parameters()).step()


def test_evaluations_compiled_after_training_are_no_other_model() -> None:
    """Each batch size compiles a graph, without gradients and so without a scale."""
    net = nn.Linear(8, 8)
    model = mpcompile(net, dtype=torch.float16, level="O2", emit="eager", strict=True)
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), emit="eager")
    for size in (2, 3, 4):
        model(torch.ones(size, 8)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            out = model(torch.ones(size + 4, 8))
            torch.testing.assert_close(
                out, net.forward(torch.ones(size + 4, 8)), rtol=0.01, atol=0.01
            )


def test_a_look_at_data_between_two_forwards_writes_nothing() -> None:
    """Autograd would take a copy cast again for a change of what the first forward saved."""
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    twin = copy.deepcopy(net)
    model = mpcompile(net, dtype=torch.bfloat16, level="O2", emit="eager", strict=True)
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 8)
    first = model(x)
    assert all(p.data.norm() > 0 for p in model.parameters())
    (first + model(2 * x)).mean().backward()
    (twin(x) + twin(2 * x)).mean().backward()
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=0.05, atol=0.01)
    net[0].weight.data.mul_(2)  # a change is still seen
    twin[0].weight.data.mul_(2)
    torch.testing.assert_close(model(x), twin(x), rtol=0.05, atol=0.05)
    del optimizer


def test_a_tied_weight_between_two_forwards() -> None:
    """Compiling takes its .data; it is not stored low, so nothing counts its gradients."""
    model = mpcompile(Tied(), dtype=torch.bfloat16, level="O2", emit="aot_eager", strict=True)
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), emit="eager")
    tokens = torch.randint(20, (4, 3))
    for _ in range(2):
        (model(tokens) + model(tokens.flip(0))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_pickled_module_is_a_plain_one() -> None:
    net = nn.Linear(8, 8)
    model = mpcompile(net, dtype=torch.float16, level="O2", emit="eager", strict=True)
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), emit="eager")
    model(torch.ones(2, 8)).mean().backward()
    optimizer.step()
    assert type(net.weight) is MasterWeight
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded.weight) is nn.Parameter
    assert not any(name.startswith("_mp") for name in vars(loaded.weight))
    torch.testing.assert_close(loaded.weight, net.weight, rtol=0, atol=0)


def test_the_module_stays_what_it_was() -> None:
    model, optimizer = trained(Net())
    one_step(model, optimizer)
    state = model.state_dict()
    assert list(state) == list(Net().state_dict())
    assert all(v.dtype is torch.float32 for v in state.values())
    assert isinstance(model.fc1.weight, nn.Parameter)  # type: ignore[union-attr]
    assert type(model.fc1.weight) is MasterWeight  # type: ignore[union-attr]
    assert all(type(p) is nn.Parameter for p in copy.deepcopy(model).parameters())


def test_memory_is_sixteen_bytes_for_each_parameter_with_adam() -> None:
    model = nn.Linear(64, 64, bias=False)
    mpcompile(model, level="O2", dtype=torch.bfloat16, emit="eager")
    optimizer = MPOptimizer(torch.optim.AdamW(model.parameters()), emit="eager")
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    held = optimizer.memory()
    assert {k: round(v, 2) for k, v in held.items()} == {
        "masters": 4.0,
        "copies": 2.0,
        "gradients": 2.0,
        "state": 8.0,
    }
