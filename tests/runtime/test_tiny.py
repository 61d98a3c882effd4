"""The smallest thing that must work: one layer, one step. Runs before each commit."""

import copy

import pytest
import torch
from torch import nn

from mpcompile import mpcompile

pytestmark = pytest.mark.inside


def test_one_step_moves_the_weights_as_fp32_does() -> None:
    reference = nn.Linear(8, 8)
    model = mpcompile(copy.deepcopy(reference), dtype=torch.float16, emit="eager", strict=True)
    x = torch.randn(4, 8)
    for network in (reference, model):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        network(x).square().mean().backward()
        optimizer.step()
    assert model.weight.grad.dtype is torch.float32
    torch.testing.assert_close(model.weight, reference.weight, atol=1e-3, rtol=1e-3)
    assert not torch.equal(model.weight, reference.weight)  # it did run in FP16
