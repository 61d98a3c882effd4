"""Parameters that share their memory with something else, which writes to it: the next forward of
an O2 model reads the new weights, as in plain PyTorch. Each row gives a writer of all of them.

And parameters whose contents torch exchanges: `swap_tensors`, and what calls it. Torch does so only
for a tensor without a weak reference, so a compile and a training leave none. (Of the parameters of
an optimizer that Dynamo traces, in a whole step, it keeps one itself.)
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compare import COMBINED
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from mpcompile import LossScale, MPOptimizer, loss_scale_of, mpcompile
from mpcompile.scaling.copies import MasterWeight, copies_of

Write = Callable[[], None]


def doubled(*tensors: torch.Tensor) -> Write:
    def write() -> None:
        with torch.no_grad():
            for tensor in tensors:
                tensor.mul_(2)

    return write


def flat_buffer(net: nn.Module) -> Write:
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    at = 0
    for p in net.parameters():
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    return doubled(flat)


def of_a_vector(net: nn.Module) -> Write:
    flat = parameters_to_vector(net.parameters()).detach().clone()
    vector_to_parameters(flat, net.parameters())
    return doubled(flat)


def strided(net: nn.Module) -> Write:
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    at = 0
    for p in net.parameters():
        p.data = flat.as_strided(p.shape, p.stride(), at)
        at += p.numel()
    return doubled(flat)


def another_parameter(net: nn.Module) -> Write:
    others = [nn.Parameter(p.data) for p in net.parameters()]
    return doubled(*others)


def another_model(net: nn.Module) -> Write:
    other = copy.deepcopy(net)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        q.data = p.data
    return doubled(*other.parameters())


def by_set(net: nn.Module) -> Write:
    others = [
        torch.empty(0).set_(p.detach().untyped_storage(), 0, p.shape) for p in net.parameters()
    ]  # type: ignore[call-overload]
    return doubled(*others)


def numpy_made(net: nn.Module) -> Write:
    arrays = [p.detach().numpy().copy() for p in net.parameters()]
    views = [torch.from_numpy(array) for array in arrays]
    for p, view in zip(net.parameters(), views, strict=True):
        p.data = view
    return doubled(*views)


def by_dlpack(net: nn.Module) -> Write:
    return doubled(*[torch.from_dlpack(p.detach()) for p in net.parameters()])


def in_shared_memory(net: nn.Module) -> Write:
    net.share_memory()
    # Another process has other tensors over it, of which this one knows nothing.
    rebuilt = [
        torch.frombuffer(p.data.numpy(), dtype=p.dtype).view(p.shape) for p in net.parameters()
    ]
    return doubled(*rebuilt)


def kept_data(net: nn.Module) -> Write:
    return doubled(*[p.data for p in net.parameters()])


def state_dict(net: nn.Module) -> Write:
    return doubled(*net.state_dict().values())


def one_row(net: nn.Module) -> Write:
    return doubled(*[p.data[:] for p in net.parameters()])


ROWS = [
    flat_buffer, of_a_vector, strided, another_parameter, another_model, by_set, numpy_made,
    by_dlpack, in_shared_memory, kept_data, state_dict, one_row,
]  # fmt: skip


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@COMBINED
@pytest.mark.parametrize("late", [False, True], ids=["before", "after a step"])
@pytest.mark.parametrize("share", ROWS)
def test_a_write_is_seen(share: Any, late: bool, how: Any) -> None:
    net, x = made(), torch.randn(8, 16)
    write = None if late else share(net)
    model = mpcompile(net, **how)
    optimizer = MPOptimizer(torch.optim.SGD(net.parameters(), lr=0.01))
    step(model, optimizer, x)
    write = write or share(net)
    for _ in range(2):
        step(model, optimizer, x)
        write()
        with torch.no_grad():
            wanted = copy.deepcopy(net)(x)  # not compiled
        found = model(x).detach()
        assert (found - wanted).norm() < 0.02 * wanted.norm()


def test_a_copy_is_cast_once_a_step_where_nothing_is_shared() -> None:
    net, x = made(), torch.randn(8, 16)
    model = mpcompile(net, dtype=torch.bfloat16, level="O2", emit="aot_eager")
    optimizer = MPOptimizer(torch.optim.SGD(net.parameters(), lr=0.01))
    for _ in range(2):
        step(model, optimizer, x)
    for p in net.parameters():
        assert isinstance(p, MasterWeight)
        (working,) = copies_of(p).values()
        assert not working.is_stale(p)


LOW = [torch.float16, torch.bfloat16]
LEVELS = ["O1", "O2"]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def loaded(net: nn.Module) -> None:
    net.load_state_dict(network(1).state_dict())


def converted(net: nn.Module) -> None:
    net.double().float()


def by_hand(net: nn.Module) -> None:
    for p, q in zip(net.parameters(), network(1).parameters(), strict=True):
        if torch.__future__.get_swap_module_params_on_conversion():
            torch.utils.swap_tensors(p, q)
        else:
            p.data.copy_(q)


@pytest.fixture
def swaps() -> Iterator[Callable[[bool], None]]:
    yield torch.__future__.set_swap_module_params_on_conversion
    torch.__future__.set_swap_module_params_on_conversion(False)


def trained(
    level: str, low: torch.dtype, masters: bool, change: Callable[[nn.Module], None]
) -> tuple[list[Tensor], int]:
    """Losses and parameters after six steps, of which the fifth overflows, and the steps skipped;
    `change` is called of the model before the third.
    """
    torch._dynamo.reset()
    net = network()
    model = mpcompile(net, level=level, dtype=low, emit="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if masters:
        optimizer = MPOptimizer(optimizer)
    x, losses = torch.randn(8, 16), []
    for step in range(6):
        if step == 2:
            change(net)
        loss = model(x * (1e6 if step == 4 else 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in net.parameters())], loss_scale_of(model).skipped_steps


@pytest.mark.parametrize("change", [loaded, converted, by_hand])
@pytest.mark.parametrize("masters", [False, True], ids=["plain", "masters"])
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("level", LEVELS)
def test_a_training_goes_on_as_after_a_copy(
    level: str, low: torch.dtype, masters: bool, change: Callable[[nn.Module], None],
    swaps: Callable[[bool], None],
) -> None:  # fmt: skip
    swaps(False)
    wanted, skipped = trained(level, low, masters, change)
    swaps(True)
    found, also_skipped = trained(level, low, masters, change)
    # Without its MPOptimizer's copies, a weight's update is rounded once less.
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert skipped == also_skipped == (low == torch.float16)


@pytest.mark.parametrize("level", LEVELS)
def test_an_mp_optimizer_and_its_scale_stay(level: str, swaps: Callable[[bool], None]) -> None:
    scale, net = LossScale.static(64.0), network()
    model = mpcompile(net, level=level, dtype=torch.float16, emit="aot_eager")
    optimizer = MPOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), loss_scale=scale)
    swaps(True)
    for factor in (1.0, 1e9):
        model(torch.randn(8, 16) * factor).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        loaded(net)
        assert loss_scale_of(model) is scale
    assert scale.skipped_steps == 1


def test_another_leaf_goes_at_once() -> None:
    """Such as an embedding's output, which PEFT lets require a gradient in each call."""
    model = mpcompile(network(), dtype=torch.float16, emit="aot_eager")
    for _ in range(3):
        x = torch.randn(8, 16, requires_grad=True)
        model(x).mean().backward()
        alive = weakref.ref(x)
        gc.disable()
        try:
            del x
            assert alive() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_before_a_swap_is_skipped(
    level: str, clips: bool, swaps: Callable[[bool], None]
) -> None:
    """Also where the loop makes finite numbers of what is not finite."""
    net = network()
    model = mpcompile(net, level=level, dtype=torch.float16, emit="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    swaps(True)
    for step in range(3):
        model(torch.randn(8, 16) * (1e6 if step == 1 else 1)).square().mean().backward()
        if step == 1:
            converted(net)
            for p in net.parameters() if clips else ():
                p.grad = p.grad.nan_to_num(0.0, 1.0, -1.0)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    assert all(bool(p.isfinite().all()) for p in net.parameters())
    assert loss_scale_of(model).skipped_steps == 1


@pytest.mark.parametrize("emit", ["aot_eager", "inductor"])
@pytest.mark.parametrize("low", LOW)
def test_no_weak_reference_is_left(low: torch.dtype, emit: str) -> None:
    net = network()
    model = mpcompile(net, level="O2", dtype=low, emit=emit)
    optimizer = MPOptimizer(torch.optim.AdamW(net.parameters(), fused=True))
    for _ in range(3):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(torch.randn(8, 16))
    assert [name for name, p in net.named_parameters() if weakref.getweakrefs(p)] == []


def test_what_stands_on_a_parameter_stays_at_home() -> None:
    net = network()
    mpcompile(net, dtype=torch.float16, emit="aot_eager")(torch.randn(8, 16)).sum().backward()
    parameter = net[0].weight
    assert vars(parameter)
    assert not vars(copy.deepcopy(parameter))
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=True), parameter)
