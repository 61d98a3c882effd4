"""Working copies: what a forward reads; when a model gets and loses them, and what its owner
sees of them.
"""

import copy
import gc
import pickle

import pytest
import torch
import torch.nn.functional as F
from low_gradients import HALVES, Net, Tied, check_against_fp64, loss, one_step, trained
from torch import nn
from weight_writes import HANDLES, WRITES

from mpcompile import MPOptimizer, mpcompile
from mpcompile.demo import GPT, GPTConfig
from mpcompile.devices.cpu import CPU
from mpcompile.scaling.copies import MasterWeight, copies_of


def without_copies(model: nn.Module, dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """What O2 computes from the masters as they are: the casts are in the graph."""
    return mpcompile(copy.deepcopy(model), level="O2", dtype=dtype, emit="eager")(x)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_matrices_are_read_through_copies_and_norms_in_fp32(dtype: torch.dtype, level: str) -> None:
    model = Net()
    optimizer = trained(model, dtype=dtype, lr=0.05, level=level)
    one_step(model, optimizer)
    for name, parameter in model.named_parameters():
        copies = copies_of(parameter)
        assert parameter.dtype is torch.float32
        assert list(copies) == ([] if name.startswith("norm") else [dtype])
        for kept in copies.values():
            assert torch.equal(kept.tensor, parameter.detach().to(dtype))


def test_at_o1_they_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """And there are none where a weight gradient need not be rounded."""
    start, found = Net(), []
    for rounded in (True, False):
        monkeypatch.setattr(CPU, "products_leave_in_fp32", lambda _, rounded=rounded: not rounded)
        model = copy.deepcopy(start)
        optimizer = trained(model, dtype=torch.bfloat16, lr=0.05, level="O1")
        for seed in (0, 1, 2):
            torch.manual_seed(seed)
            one_step(model, optimizer)
        assert any(copies_of(p) for p in model.parameters()) is rounded
        found.append(list(model.parameters()))
    assert all(map(torch.equal, *found))


def test_without_an_mpoptimizer_there_are_no_copies() -> None:
    model = mpcompile(Net(), level="O2", dtype=torch.float16, emit="eager")
    model(torch.randn(4, 8)).mean().backward()
    assert all(not copies_of(p) and type(p) is nn.Parameter for p in model.parameters())
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


@pytest.mark.slow_rows("trainings that overflow, against FP64")
@pytest.mark.parametrize("change", WRITES)
@pytest.mark.parametrize("grad", [True, False], ids=["train", "no_grad"])
def test_a_change_from_outside_is_read_by_the_next_forward(change: str, grad: bool) -> None:
    model = Net()
    optimizer = trained(model, dtype=torch.bfloat16, lr=0.05)
    one_step(model, optimizer)
    x = torch.randn(4, 8)
    before = model(x)
    WRITES[change](model)
    with torch.set_grad_enabled(grad):
        after = model(x)
    assert torch.equal(after, without_copies(model, torch.bfloat16, x))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("handle", HANDLES)
@pytest.mark.parametrize("gone", [False, True])
def test_a_handle_taken_earlier_and_written_later_is_seen(handle: str, gone: bool) -> None:
    model = Net()
    optimizer = trained(model, dtype=torch.bfloat16, lr=0.05)
    one_step(model, optimizer)
    handles = [HANDLES[handle](p) for p in model.parameters()]
    x = torch.randn(4, 8)
    model(x)
    for k in range(len(handles)):
        handles[k] *= 0.5
    if gone:
        handles.clear()
    assert torch.equal(model(x), without_copies(model, torch.bfloat16, x))


def test_the_step_leaves_the_copies_fresh() -> None:
    model = Net()
    optimizer = trained(model, lr=0.05)
    for rows in range(4, 7):
        one_step(model, optimizer, rows)
        kept = copies_of(model.fc1.weight)[torch.float16]  # type: ignore[arg-type, union-attr]
        with torch.no_grad():
            kept.tensor.add_(1)  # a forward that cast again would undo this
        x = torch.randn(4, 8)
        assert not torch.allclose(model(x), without_copies(model, torch.float16, x))
        with torch.no_grad():
            kept.tensor.sub_(1)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("emit", ["aot_eager", "inductor"])
def test_tied_weights_have_one_copy_and_a_true_fp32_gradient(
    level: str, dtype: torch.dtype, emit: str
) -> None:
    reference = Tied().double()
    model = Tied()
    model.load_state_dict(reference.state_dict())
    optimizer = trained(model, lr=0.05, level=level, dtype=dtype, emit=emit)
    tokens = torch.randint(0, 20, (6, 5))
    for net in (model, reference):
        F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
    weight = model.embedding.weight  # type: ignore[union-attr]
    assert weight.grad.dtype is torch.float32  # type: ignore[union-attr]
    wanted = reference.embedding.weight.grad
    rtol = 4 * torch.finfo(dtype).eps
    assert (weight.grad - wanted).norm() < rtol * wanted.norm()  # type: ignore[operator, union-attr]
    optimizer.step()
    (kept,) = copies_of(weight).values()  # type: ignore[arg-type]
    assert torch.equal(kept.tensor, weight.detach().to(dtype))  # type: ignore[union-attr, operator]


class Named(nn.Parameter):
    """Someone's own class of parameters."""


def test_a_parameter_of_another_class_is_never_read_stale() -> None:
    """It keeps its class, which doesn't note writes through `.data`: so each forward casts it."""
    model = Net()
    model.fc1.weight = Named(model.fc1.weight.detach().clone())  # type: ignore[union-attr]
    optimizer = trained(model, lr=0.05)
    x = torch.randn(4, 8)
    for _ in range(2):
        one_step(model, optimizer)
        weight = model.fc1.weight
        assert type(weight) is Named
        assert torch.float16 in copies_of(weight)
        weight.data.mul_(2)
        assert torch.equal(model(x), without_copies(model, torch.float16, x))


@pytest.mark.slow("trainings that overflow, against FP64")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("emit", ["aot_eager", "inductor"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_compiled_training_follows_the_same_graph_run_as_it_is(emit: str, level: str) -> None:
    start = GPT(GPTConfig(vocab=61, context=16, width=32, layers=1, heads=2))
    tokens = torch.randint(61, (3, 2, 16))
    losses = []
    for how in ("eager", emit):
        model = mpcompile(
            copy.deepcopy(start), level=level, dtype=torch.bfloat16, emit=how, strict=True
        )
        optimizer = MPOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), emit=how)
        for x in tokens:
            loss = model(x, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        assert any(copies_of(p) for p in model.parameters())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=0)


# -- their owner -----------------------------------------------------------------------------------


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
    model = Net()
    optimizer = trained(model, lr=0.05)
    one_step(model, optimizer)
    del optimizer
    gc.collect()
    assert check_against_fp64(model, lambda net: loss(net).backward()) == []
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


@pytest.mark.slow("trainings that overflow, against FP64")
def test_autograd_knows_that_a_step_wrote_the_copies() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    model = mpcompile(net, dtype=torch.bfloat16, level="O2", emit="eager", strict=True)
    optimizer = MPOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), emit="inductor")
    x = torch.randn(4, 8)
    model(x).mean().backward()
    late = model(x).mean()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


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
    model = Net()
    optimizer = trained(model, lr=0.05)
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
