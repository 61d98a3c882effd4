"""Parameters that share their memory with something else, which writes to it: the next forward of
an O2 model reads the new weights, as in plain PyTorch. Each row gives a writer of all of them.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import COMBINED
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from mpcompile import MPOptimizer, mpcompile
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
