"""Mixtures of experts that fill a buffer they made, and return it."""

import pytest
import torch
import torch.nn.functional as F
from loops import MOSTLY_O1, O1, O2, Way, agree
from torch import nn


class Experts(nn.Module):
    """Top-1 routing; each expert's results are put where its tokens came from."""

    def __init__(self, fill: str) -> None:
        super().__init__()
        self.fill, self.router = fill, nn.Linear(16, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, places: list[torch.Tensor]) -> torch.Tensor:
        gates = self.router(x).softmax(-1)
        out = torch.zeros_like(x) if self.fill != "slices" else x.new_zeros(x.shape)
        for i, (expert, index) in enumerate(zip(self.experts, places, strict=True)):
            result = expert(x[index]) * gates[index, i, None]
            if self.fill == "index_add_":
                out.index_add_(0, index, result)
            elif self.fill == "index_copy_":
                out.index_copy_(0, index, result)
            elif self.fill == "index_put_":
                out[index] = result
            elif self.fill == "scatter_add_":
                out.scatter_add_(0, index[:, None].expand_as(result), result)
            else:
                out[i * 4 : i * 4 + 4] = result
        return out


FILLS = ["index_add_", "index_copy_", "index_put_", "scatter_add_", "slices"]


@pytest.mark.slow_rows("a loop in each way of training, against FP64")
@pytest.mark.parametrize("way", [O1, O2], ids=str)
@pytest.mark.parametrize("fill", [*FILLS[:-1], "slices"])
def test_a_filled_buffer_is_returned(fill: str, way: Way) -> None:
    def loop(way: Way) -> None:
        model = way.model(Experts(fill))
        head = way.model(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4)))
        parameters = [*model.parameters(), *head.parameters()]
        optimizer = way.optimizer(torch.optim.SGD(parameters, lr=0.5))
        x, y = torch.randn(3, 8, 16), torch.randint(4, (3, 8))
        for step, update in way.updates(3, model, head, optimizer, planted=1):
            order = torch.randperm(8)
            update(F.cross_entropy(head(model(x[step], [order[:4], order[4:]])), y[step]))

    agree(way, loop)


class Residual(Experts):
    """The same, with the buffer used once more before it leaves."""

    def forward(self, x: torch.Tensor, places: list[torch.Tensor]) -> torch.Tensor:
        return x + super().forward(x, places)


@MOSTLY_O1
@pytest.mark.parametrize("fill", FILLS)
def test_a_filled_buffer_is_added_to_the_input(fill: str, way: Way) -> None:
    def loop(way: Way) -> None:
        model = way.model(Residual(fill))
        optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        x, y = torch.randn(3, 8, 16), torch.randn(3, 8, 16)
        for step, update in way.updates(3, model, optimizer, planted=1):
            order = torch.randperm(8)
            update(F.mse_loss(model(x[step], [order[:4], order[4:]]), y[step]))

    agree(way, loop)
