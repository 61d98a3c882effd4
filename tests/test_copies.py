"""O2's working copies: what a forward reads, and how its gradients are stored."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpcompile import LossScale, MPCompileError, MPOptimizer, loss_scale_of, mpcompile
from mpcompile.demo import GPT, GPTConfig
from mpcompile.state.copies import MasterWeight, copies_of

HALVES = [torch.float16, torch.bfloat16]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc2(F.gelu(self.norm(self.fc1(x))))
        return y


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.middle(self.embedding(tokens)))
        return y


def trained(
    model: nn.Module, dtype: torch.dtype = torch.float16, lr: float = 0.05, **options: Any
) -> tuple[nn.Module, MPOptimizer]:
    scale = LossScale.dynamic(init_scale=2.0**10) if dtype is torch.float16 else "dynamic"
    model = mpcompile(model, level="O2", dtype=dtype, emit="eager", loss_scale=scale)
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return model, MPOptimizer(sgd, emit="eager", **options)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def without_copies(model: nn.Module, dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """What O2 computes from the masters as they are: the casts are in the graph."""
    twin = mpcompile(copy.deepcopy(model), level="O2", dtype=dtype, emit="eager")
    result: torch.Tensor = twin(x)
    return result


# -- what is read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_matrices_are_read_through_copies_and_norms_in_fp32(dtype: torch.dtype) -> None:
    model, optimizer = trained(Net(), dtype)
    one_step(model, optimizer)
    for name, parameter in model.named_parameters():
        copies = copies_of(parameter)
        assert parameter.dtype is torch.float32
        assert list(copies) == ([] if name.startswith("norm") else [dtype])
        for kept in copies.values():
            assert torch.equal(kept.tensor, parameter.detach().to(dtype))


def test_without_an_mpoptimizer_there_are_no_copies() -> None:
    model = mpcompile(Net(), level="O2", dtype=torch.float16, emit="eager")
    model(torch.randn(4, 8)).mean().backward()
    assert all(not copies_of(p) and type(p) is nn.Parameter for p in model.parameters())
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


def _load(model: nn.Module) -> None:
    model.load_state_dict({k: torch.full_like(v, 0.3) for k, v in model.state_dict().items()})


def _initialise(model: nn.Module) -> None:
    nn.init.constant_(model.fc1.weight, 0.3)  # type: ignore[arg-type, union-attr]


def _swap_averages(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(
            list(model.parameters()), [torch.ones_like(p) for p in model.parameters()], 0.5
        )


def _write_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.01, 0.01)


def _assign_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = torch.full_like(p, 0.2)


def _vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 0.5, model.parameters())


def _other_optimizer(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None
        p.grad_dtype = torch.float32
        p.grad = torch.ones_like(p)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


def _other_optimizer_foreach(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None
        p.grad_dtype = torch.float32
        p.grad = torch.ones_like(p)
    torch.optim.Adam(model.parameters(), lr=0.1, foreach=True).step()
    model.zero_grad()


def _inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        for p in model.parameters():
            p.mul_(0.5)


def _detached(model: nn.Module) -> None:
    for p in model.parameters():
        p.detach().mul_(0.5)


def _to(model: nn.Module) -> None:
    model.double()
    model.float()
    with torch.no_grad():
        model.fc1.weight.mul_(2)  # type: ignore[operator, union-attr]


CHANGES = [
    _load, _initialise, _swap_averages, _write_data, _assign_data, _vector, _other_optimizer,
    _other_optimizer_foreach, _inference_mode, _detached, _to,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("grad", [True, False], ids=["train", "no_grad"])
def test_a_change_from_outside_is_read_by_the_next_forward(
    change: Callable[[nn.Module], None], grad: bool
) -> None:
    model, optimizer = trained(Net(), torch.bfloat16)
    one_step(model, optimizer)
    x = torch.randn(4, 8)
    before = model(x)
    change(model)
    with torch.set_grad_enabled(grad):
        after = model(x)
    assert torch.equal(after, without_copies(model, torch.bfloat16, x))
    assert not torch.equal(after, before)


def test_data_taken_earlier_and_written_later_is_seen() -> None:
    model, optimizer = trained(Net(), torch.bfloat16)
    one_step(model, optimizer)
    handles = [p.data for p in model.parameters()]
    x = torch.randn(4, 8)
    model(x)
    for data in handles:
        data.mul_(0.5)
    assert torch.equal(model(x), without_copies(model, torch.bfloat16, x))


def test_the_step_leaves_the_copies_fresh() -> None:
    model, optimizer = trained(Net())
    for seed in range(3):
        one_step(model, optimizer, seed)
        kept = copies_of(model.fc1.weight)[torch.float16]  # type: ignore[arg-type, union-attr]
        with torch.no_grad():
            kept.tensor.add_(1)  # a forward that cast anew would undo this
        x = torch.randn(4, 8)
        assert not torch.allclose(model(x), without_copies(model, torch.float16, x))
        with torch.no_grad():
            kept.tensor.sub_(1)


def test_tied_weights_have_one_copy_and_a_true_fp32_gradient() -> None:
    torch.manual_seed(0)
    reference = Tied().double()
    model = Tied()
    model.load_state_dict(reference.state_dict())
    model, optimizer = trained(model)
    tokens = torch.randint(0, 20, (6, 5))
    for net in (model, reference):
        F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
    weight = model.embedding.weight  # type: ignore[union-attr]
    assert weight.grad.dtype is torch.float32  # type: ignore[union-attr]
    wanted = reference.embedding.weight.grad
    assert wanted is not None
    assert (weight.grad - wanted).norm() < 5e-3 * wanted.norm()  # type: ignore[operator, union-attr]
    optimizer.step()
    (kept,) = copies_of(weight).values()  # type: ignore[arg-type]
    assert torch.equal(kept.tensor, weight.detach().half())  # type: ignore[union-attr, operator]


# -- gradients -------------------------------------------------------------------------------------


def true_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    scale = loss_scale_of(model).value
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        scaled = p.grad.dtype is torch.float16
        found[name] = p.grad.double() / (scale if scaled else 1.0)
    return found


def check_against_fp64(model: nn.Module, run: Callable[[nn.Module], None]) -> None:
    reference = copy.deepcopy(model).double()
    run(model)
    run(reference)
    for (name, got), wanted in zip(
        true_gradients(model).items(), reference.parameters(), strict=True
    ):
        assert wanted.grad is not None
        error = (got - wanted.grad).norm() / wanted.grad.norm()
        assert error < 2e-2, f"{name}: {error}"


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_are_stored_low(dtype: torch.dtype) -> None:
    model, _ = trained(Net(), dtype)
    x = torch.randn(4, 8)
    check_against_fp64(model, lambda net: net(x.to(dtype_of(net))).square().mean().backward())
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert p.grad.dtype is (torch.float32 if name.startswith("norm") else dtype)


def test_accumulated_gradients_add_up() -> None:
    model, _ = trained(Net())
    xs = torch.randn(3, 4, 8)

    def run(net: nn.Module) -> None:
        for x in xs:
            net(x.to(dtype_of(net))).square().mean().backward()

    check_against_fp64(model, run)


def test_a_model_called_twice_in_one_backward() -> None:
    model, _ = trained(Net())
    xs = torch.randn(2, 4, 8)

    def run(net: nn.Module) -> None:
        a, b = (net(x.to(dtype_of(net))) for x in xs)
        (a * b).mean().backward()

    check_against_fp64(model, run)


def test_a_checkpoint_around_the_model() -> None:
    model, _ = trained(Net())
    x = torch.randn(4, 8)

    model(
        x
    )  # what is saved while compiling is not saved while recomputing: stock torch.compile too

    def run(net: nn.Module) -> None:
        inputs = x.to(dtype_of(net)).requires_grad_()
        for _ in range(2):
            checkpoint(net, inputs, use_reentrant=False).square().mean().backward()

    model(x.clone().requires_grad_())  # what is saved while compiling is not saved again
    model.zero_grad()
    check_against_fp64(model, run)


class Broken(nn.Module):
    """Two graphs that share a weight: the first reads it low, the second low or in FP32."""

    def __init__(self, second: str) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.second = second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        torch._dynamo.graph_break()
        if self.second == "low":
            z: torch.Tensor = self.fc(y)
            return z
        return y * self.fc.weight.softmax(-1).sum()


@pytest.mark.parametrize("second", ["low", "full"])
def test_two_graphs_that_share_a_weight(second: str) -> None:
    torch.manual_seed(0)
    model, optimizer = trained(Broken(second), lr=1e-3)
    x = torch.randn(4, 8)
    for _ in range(2):
        model.zero_grad()
        check_against_fp64(model, lambda net: net(x.to(dtype_of(net))).square().mean().backward())
        optimizer.step()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_gradient_from_outside_is_added(dtype: torch.dtype) -> None:
    model, optimizer = trained(Net(), dtype)
    x = torch.randn(4, 8)

    def run(net: nn.Module) -> None:
        loss = net(x.to(dtype_of(net))).square().mean()
        (loss + net.fc1.weight.square().sum()).backward()  # type: ignore[operator, union-attr]

    check_against_fp64(model, run)
    optimizer.step()


@pytest.mark.parametrize("first", ["inside", "outside"])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_gradient_from_outside_is_added_in_a_backward_of_its_own(
    dtype: torch.dtype, first: str
) -> None:
    model, optimizer = trained(Net(), dtype)
    x = torch.randn(4, 8)

    def run(net: nn.Module) -> None:
        losses = [
            lambda: net(x.to(dtype_of(net))).square().mean(),
            lambda: net.fc1.weight.square().sum(),  # type: ignore[operator, union-attr]
        ]
        for loss in losses if first == "inside" else reversed(losses):
            loss().backward()
        net(x.to(dtype_of(net))).square().mean().backward()

    check_against_fp64(model, run)
    optimizer.step()


def test_a_half_gradient_from_outside_is_refused_in_fp16() -> None:
    class HalfGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
            return weight.sum()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return torch.ones(16, 8, dtype=torch.float16)

    model, _ = trained(Net())
    loss = model(torch.randn(4, 8)).mean() + HalfGradient.apply(model.fc1.weight)  # type: ignore[no-untyped-call, union-attr]
    with pytest.raises(MPCompileError, match="outside the compiled model"):
        loss.backward()


def test_clipping_scaled_gradients_by_hand_is_refused() -> None:
    model, optimizer = trained(Net())
    model(torch.randn(4, 8)).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(MPCompileError, match="max_grad_norm"):
        optimizer.step()


def test_clipping_by_hand_works_in_bf16() -> None:
    model, optimizer = trained(Net(), torch.bfloat16)
    model(torch.randn(4, 8)).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    moved = torch.stack([(p - b).norm() for p, b in zip(model.parameters(), before, strict=True)])
    assert 0 < moved.norm() < 0.05 * 1e-3 * 1.05


def test_a_plain_optimizer_does_not_take_scaled_gradients() -> None:
    model, _optimizer = trained(Net())
    model(torch.randn(4, 8)).mean().backward()
    with pytest.raises(MPCompileError, match="FP16 times the loss scale"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_zeroing_in_place_is_no_tampering() -> None:
    model, optimizer = trained(Net())
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(4, 8)).mean().backward()
        optimizer.step()
    assert not optimizer.skipped


def test_two_models_that_share_a_weight_need_one_scale() -> None:
    first, second = Net(), Net()
    second.fc1.weight = first.fc1.weight
    for net in (first, second):
        mpcompile(net, level="O2", dtype=torch.float16, emit="eager")
    parameters = {id(p): p for net in (first, second) for p in net.parameters()}
    _optimizer = MPOptimizer(torch.optim.SGD(parameters.values(), lr=0.1), emit="eager")
    first(torch.randn(4, 8))
    with pytest.raises(MPCompileError, match="same LossScale"):
        second(torch.randn(4, 8))


# -- who owns --------------------------------------------------------------------------------------


def test_an_optimizer_made_after_the_first_forward_is_noticed() -> None:
    model = mpcompile(Net(), level="O2", dtype=torch.float16, emit="eager")
    model(torch.randn(4, 8)).mean().backward()
    model.zero_grad()
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), emit="eager")
    model(torch.randn(4, 8)).mean().backward()
    assert model.fc1.weight.grad.dtype is torch.float16  # type: ignore[union-attr]
    optimizer.step()


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
    """Autograd would take a copy cast anew for a change of what the first forward saved."""
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
    model = mpcompile(nn.Linear(64, 64, bias=False), level="O2", dtype=torch.float16, emit="eager")
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


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_training_follows_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    reference, data = Net(), torch.randn(30, 16, 8)
    model, optimizer = trained(copy.deepcopy(reference), dtype, max_grad_norm=1.0)
    plain = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for x in data:
        y = x[:, :4].sin()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted = F.mse_loss(reference(x), y)
        wanted.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
    assert abs(loss - wanted) < 0.02 * wanted


@pytest.mark.parametrize("emit", ["aot_eager", "inductor"])
def test_compiled_training_follows_the_same_graph_run_as_it_is(emit: str) -> None:
    torch.manual_seed(0)
    start = GPT(GPTConfig(vocab=61, context=16, width=32, layers=1, heads=2))
    tokens = torch.randint(61, (3, 2, 16))
    losses = []
    for how in ("eager", emit):
        model = mpcompile(
            copy.deepcopy(start), level="O2", dtype=torch.bfloat16, emit=how, strict=True
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


def test_an_overflow_changes_neither_masters_nor_copies() -> None:
    scale = LossScale.dynamic(init_scale=2.0**24)
    model = mpcompile(Net(), level="O2", dtype=torch.float16, emit="eager", loss_scale=scale)
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), emit="eager")
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(4, 8)).mean().backward()
    optimizer.step()
    assert optimizer.skipped
    assert scale.value == 2.0**23
    assert scale.skipped_steps == optimizer.skipped_steps == 1
    for p, b in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, b)
        for kept in copies_of(p).values():
            assert torch.equal(kept.tensor, b.half())
