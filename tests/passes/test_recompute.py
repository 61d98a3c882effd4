"""`recompute=True`: fewer bytes between forward and backward, the same gradients."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from mpcompile import MPCompileError, mpcompile

WIDTH, BATCH = 64, 128


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.25), nn.Linear(2 * WIDTH, WIDTH),
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8),
    )  # fmt: skip


def train_once(net: nn.Module, x: torch.Tensor, **options: Any) -> int:
    """One step from seed 1; returns the bytes kept for its backward, parameters left out."""
    mpcompile(net, dtype=torch.bfloat16, strict=True, **options)
    net(x)  # compiles
    own = {p.untyped_storage().data_ptr() for p in (*net.parameters(), x)}
    held: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = net(x).square().mean()
    loss.backward()
    return sum(held.values())


@pytest.mark.slow("compiles by Inductor, or a deep model")
def test_activations_and_norms_are_computed_again() -> None:
    stores, recomputes = model(), model()
    x = torch.randn(BATCH, WIDTH)
    stored, kept = train_once(stores, x), train_once(recomputes, x, recompute=True)
    # What GELU and dropout make is BATCH x 2 WIDTH in BF16, what the norm makes half of that.
    assert stored - kept >= 2 * (2 * WIDTH) * BATCH
    for ours, theirs in zip(recomputes.parameters(), stores.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-2, atol=1e-5)


def test_it_is_inductors() -> None:
    with pytest.raises(MPCompileError, match=r"recompute=True is Inductor's"):
        mpcompile(copy.deepcopy(model()), recompute=True, emit="eager")
    with pytest.raises(MPCompileError, match=r"recompute='yes': use True or False"):
        mpcompile(model(), recompute="yes")
