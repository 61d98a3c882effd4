"""O2's working copies stored padded: training doesn't know, and the zeros stay zeros."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_of import module_of
from torch import Tensor, nn

from mpcompile import LossScale, MPOptimizer, mpcompile
from mpcompile.scaling.copies import WorkingCopy, copies_of

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def net() -> Any:
    """Every dim odd; between the products something that fills lanes with 0.5."""
    return module_of(
        lambda m, x: m.down(torch.sigmoid(m.up(m.conv(x).relu().flatten(1)))),
        conv=nn.Conv2d(3, 5, 3), up=nn.Linear(45, 21), down=nn.Linear(21, 13),
    )  # fmt: skip


def trained(model: nn.Module, pad: str, dtype: torch.dtype, **options: Any) -> MPOptimizer:
    """The model compiled in place at O2, and its optimizer."""
    scale = LossScale.dynamic(init_scale=2.0**10) if dtype is torch.float16 else "dynamic"
    mpcompile(model, level="O2", dtype=dtype, emit="eager", loss_scale=scale, pad=pad, strict=True)
    return MPOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), emit="eager", **options)


def image(seed: int) -> Tensor:
    return torch.randn(7, 3, 5, 5, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, optimizer: MPOptimizer, seed: int = 0, *, clear: bool = True) -> Tensor:
    loss: Tensor = model(image(seed)).square().mean()
    loss.backward()
    optimizer.step()
    if clear:
        optimizer.zero_grad()
    return loss.detach()


def copies(model: nn.Module) -> dict[str, WorkingCopy]:
    """The one copy of each parameter, by name."""
    return {name: c for name, p in model.named_parameters() for c in copies_of(p).values()}


def check_copies(model: nn.Module) -> None:
    """Each copy holds its master, then zeros."""
    for name, kept in copies(model).items():
        master = model.get_parameter(name).detach()
        assert torch.equal(kept.tensor, master.to(kept.tensor.dtype)), name
        assert kept.stored.abs().sum() == kept.tensor.abs().sum(), name
        assert kept.tensor.data_ptr() == kept.stored.data_ptr(), name


def check_gradients(model: nn.Module, reference: nn.Module) -> None:
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert (p.grad.double() - q.grad).norm() < 3e-2 * q.grad.norm()


@pytest.mark.slow("compiles padded models, of many sizes")
@HALVES
def test_training_is_the_same(dtype: torch.dtype) -> None:
    start = net()
    found = {}
    for pad in ("never", "always"):
        model = copy.deepcopy(start)
        optimizer = trained(model, pad, dtype, max_grad_norm=0.5)
        losses, norms = [], []
        for seed in range(5):
            losses.append(step(model, optimizer, seed))
            norms.append(optimizer.grad_norm)
            check_copies(model)
        found[pad] = torch.stack(losses), torch.stack(norms)
    torch.testing.assert_close(found["always"], found["never"], rtol=2e-2, atol=1e-4)
    assert {n: tuple(c.stored.shape) for n, c in copies(model).items()} == {
        "conv.weight": (8, 8, 3, 3), "conv.bias": (8,), "up.weight": (24, 48), "up.bias": (24,),
        "down.weight": (16, 24), "down.bias": (16,),
    }  # fmt: skip


@HALVES
def test_gradients_have_the_shape_of_their_parameters(dtype: torch.dtype) -> None:
    model = net()
    reference = copy.deepcopy(model).double()
    optimizer = trained(model, "always", dtype, max_grad_norm=100.0)
    reference(image(0).double()).square().mean().backward()
    step(model, optimizer, clear=False)
    check_gradients(model, reference)
    for p in model.parameters():
        stored = torch.float32 if dtype is torch.float16 else dtype
        assert (p.grad.dtype, p.grad.shape) == (stored, p.shape)
        assert p.grad.is_contiguous()
    wanted = torch.stack([q.grad.norm() for q in reference.parameters() if q.grad is not None])
    torch.testing.assert_close(optimizer.grad_norm.double(), wanted.norm(), rtol=2e-2, atol=0)


def test_lanes_whose_gradient_is_not_zero_are_no_part_of_it() -> None:
    """0.5 in the lanes of what `down` reads gives the lanes of its copy a gradient."""
    model = net()
    optimizer = trained(model, "always", torch.float16)
    step(model, optimizer, clear=False)
    assert model.down.weight.grad is not None
    optimizer.zero_grad()
    before = copies(model)["down.weight"].stored.clone()
    step(model, optimizer)
    after = copies(model)["down.weight"].stored
    assert not torch.equal(before, after)
    assert after[13:].abs().sum() == after[:, 21:].abs().sum() == 0


def test_accumulated_gradients_add_up() -> None:
    model = net()
    reference = copy.deepcopy(model).double()
    _optimizer = trained(model, "always", torch.float16)
    for seed in range(3):
        model(image(seed)).square().mean().backward()
        reference(image(seed).double()).square().mean().backward()
    check_gradients(model, reference)


@HALVES
def test_a_tied_weight_has_one_padded_copy(dtype: torch.dtype) -> None:
    """The head of 101 words is the embedding: the head reads it padded, the embedding doesn't."""
    start = module_of(
        lambda self, tokens: F.linear(self.middle(self.words(tokens)), self.words.weight),
        words=nn.Embedding(101, 20),
        middle=nn.Linear(20, 20),
    )
    tokens = torch.randint(101, (2, 8))
    losses = {}
    for pad in ("never", "always"):
        model = copy.deepcopy(start)
        optimizer = trained(model, pad, dtype)
        for _ in range(4):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            check_copies(model)
        losses[pad] = loss.detach()
    torch.testing.assert_close(losses["always"], losses["never"], rtol=1e-2, atol=0)
    assert copies(model)["words.weight"].stored.shape == (104, 24)


def test_a_loaded_state_is_read_by_the_next_forward() -> None:
    model, other = net(), net()
    optimizer = trained(model, "always", torch.bfloat16)
    step(model, optimizer)
    model.load_state_dict(other.state_dict())
    expected = mpcompile(other, level="O2", dtype=torch.bfloat16, emit="eager", pad="never")
    torch.testing.assert_close(model(image(3)), expected(image(3)), rtol=2e-2, atol=2e-3)
    check_copies(model)


def test_graphs_share_one_copy() -> None:
    """In training and in evaluation, of any batch: one copy, padded once."""
    model = net()
    optimizer = trained(model, "always", torch.bfloat16)
    step(model, optimizer)
    before = {name: id(c.stored) for name, c in copies(model).items()}
    model.eval()
    with torch.no_grad():
        model(image(1)[:2])
    model.train()
    step(model, optimizer)
    assert {name: id(c.stored) for name, c in copies(model).items()} == before


@pytest.mark.parametrize("first", ["never", "always"])
@HALVES
def test_models_that_pad_and_models_that_do_not_share_one_copy(
    first: str, dtype: torch.dtype
) -> None:
    """The first graph says how it is stored; the other cuts it, or pads it."""
    second = "always" if first == "never" else "never"
    one, two = net(), net()
    for name in ("conv", "up", "down"):
        setattr(two, name, getattr(one, name))
    scale = LossScale.static(64.0) if dtype is torch.float16 else "none"
    for model, pad in ((one, first), (two, second)):
        options = {"dtype": dtype, "pad": pad, "loss_scale": scale}
        mpcompile(model, level="O2", emit="eager", strict=True, **options)
    optimizer = MPOptimizer(torch.optim.SGD(one.parameters(), lr=0.1), emit="eager")
    reference = copy.deepcopy(one).double()
    (one(image(0)) * two(image(0))).mean().backward()
    reference(image(0).double()).square().mean().backward()
    check_gradients(one, reference)
    optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(one(image(1)), two(image(1)), rtol=2e-2, atol=2e-3)
    check_copies(one)
    assert copies(one)["up.weight"].stored.shape == ((24, 48) if first == "always" else (21, 45))


def test_channels_last_weights_stay_so() -> None:
    model = net().to(memory_format=torch.channels_last)
    optimizer = trained(model, "always", torch.bfloat16)
    step(model, optimizer, clear=False)
    kept = copies(model)["conv.weight"].stored
    assert kept.is_contiguous(memory_format=torch.channels_last)
    weight = model.conv.weight
    assert weight.grad.is_contiguous(memory_format=torch.channels_last)
    check_copies(model)


def test_resumed_training_goes_on_as_it_would_have() -> None:
    model = net()
    optimizer = trained(model, "always", torch.float16)
    for seed in range(2):
        step(model, optimizer, seed)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert all(
        v.shape == p.shape for v, p in zip(saved[0].values(), net().parameters(), strict=True)
    )
    again = net()
    resumed = trained(again, "always", torch.float16)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for seed in range(2, 4):
        assert torch.equal(step(model, optimizer, seed), step(again, resumed, seed))


def test_memory_counts_the_padding() -> None:
    model = nn.Linear(13, 21, bias=False)
    optimizer = trained(model, "always", torch.float16)
    model(torch.randn(8, 13)).mean().backward()
    assert optimizer.memory()["copies"] == 2 * (16 * 24) / (13 * 21)
    assert optimizer.memory()["gradients"] == 4
