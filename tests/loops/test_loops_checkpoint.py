"""Activation checkpointing of both kinds, inside what is compiled and around it."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from loops import MOSTLY_O1, WAYS, Way, agree
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

KINDS = pytest.mark.parametrize(
    "reentrant",
    [pytest.param(False, id="new"), pytest.param(True, id="reentrant")],
)


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))


class Deep(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(), block()])
        self.head = nn.Linear(32, 5)
        self.checkpoint = partial(checkpoint, use_reentrant=reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.blocks:
            x = x + self.checkpoint(one, x)
        return self.head(x)


@WAYS
def test_checkpoints_inside_the_compiled_model(way: Way) -> None:
    def loop(way: Way) -> None:
        model = way.model(Deep(reentrant=False))
        optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
        x, y = torch.randn(4, 8, 32), torch.randint(5, (4, 8))
        for step, update in way.updates(4, model, optimizer, planted=2):
            update(F.cross_entropy(model(x[step]), y[step]))

    agree(way, loop)


@MOSTLY_O1
def test_reentrant_checkpoints_inside_the_compiled_model(way: Way) -> None:
    """The input needs a gradient, as the old kind demands of it."""

    def loop(way: Way) -> None:
        model = way.model(Deep(reentrant=True), strict=False)
        optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
        x, y = torch.randn(4, 8, 32), torch.randint(5, (4, 8))
        for step, update in way.updates(4, model, optimizer, planted=2):
            update(F.cross_entropy(model(x[step].requires_grad_()), y[step]))

    agree(way, loop)


@pytest.mark.slow_rows("a loop in each way of training, against FP64")
@WAYS
@KINDS
def test_compiled_blocks_inside_a_checkpoint(reentrant: bool, way: Way) -> None:
    """The loop is plain, each block is compiled, and runs its forward twice."""

    def loop(way: Way) -> None:
        blocks = [way.model(block()) for _ in range(2)]
        parameters = [p for b in blocks for p in b.parameters()]
        optimizer = way.optimizer(torch.optim.SGD(parameters, lr=0.2))
        x, y = torch.randn(4, 8, 32), torch.randn(4, 8, 32)
        for step, update in way.updates(4, *blocks, optimizer, planted=2):
            h = x[step].requires_grad_()
            for one in blocks:
                h = h + checkpoint(one, h, use_reentrant=reentrant)
            update(F.mse_loss(h, y[step]))

    agree(way, loop)


@MOSTLY_O1
@KINDS
def test_checkpoint_sequential(reentrant: bool, way: Way) -> None:
    def loop(way: Way) -> None:
        blocks = [way.model(block()) for _ in range(3)]
        model = nn.Sequential(*blocks)
        optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.2))
        x, y = torch.randn(3, 8, 32), torch.randn(3, 8, 32)
        for step, update in way.updates(3, model, optimizer, planted=1):
            out = checkpoint_sequential(
                blocks, 2, x[step].requires_grad_(), use_reentrant=reentrant
            )
            update(F.mse_loss(out, y[step]))

    agree(way, loop)


@WAYS
def test_a_block_that_has_run_before_inside_a_checkpoint(way: Way) -> None:
    def loop(way: Way) -> None:
        model = way.model(block())
        optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.2))
        x, y = torch.randn(3, 8, 32), torch.randn(3, 8, 32)
        model(x[0].clone().requires_grad_()).sum().backward()
        for step, update in way.updates(3, model, optimizer, planted=1):
            out = checkpoint(model, x[step].requires_grad_(), use_reentrant=False)
            update(F.mse_loss(out, y[step]))

    agree(way, loop)
