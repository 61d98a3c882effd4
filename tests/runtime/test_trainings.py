"""Whole trainings through Inductor, as users write them: handwritten digits, in BF16 and in FP16.

Each is compared with the same loop in FP32, and by what the model then makes of digits that it has
not seen. This is the shortest answer to "does it work here?".
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_each_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpcompile import MPOptimizer, mpcompile, train_step

STEPS, BATCH, SEEN = 48, 64, 1024


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (n, 64) in FP32 from 0 to 1, and their classes."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.data, dtype=torch.float32)[order] / 16
    return images, torch.tensor(data.target)[order]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 10))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def trained(model: nn.Module, optimizer: Any, part: slice = slice(None)) -> list[float]:
    """The loss of each step of an ordinary loop, over the rows `part` of each batch."""
    x, y = digits()
    losses = []
    for step in range(STEPS):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH)[part] % SEEN
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained_whole(model: nn.Module, optimizer: Any, **options: Any) -> list[float]:
    """The same by `train_step`."""
    x, y = digits()
    step = train_step(model, optimizer, F.cross_entropy, **options)
    batches = [torch.arange(n * BATCH, (n + 1) * BATCH) % SEEN for n in range(STEPS)]
    return [float(step(x[rows], y[rows])) for rows in batches]


def right(model: nn.Module) -> float:
    """The share of digits that it tells, of those that it was not trained on."""
    x, y = digits()
    with torch.no_grad():
        return float((model.eval()(x[SEEN:]).argmax(-1) == y[SEEN:]).float().mean())


@pytest.fixture(scope="module")
def in_fp32() -> tuple[list[float], float]:
    model = network()
    return trained(model, adamw(model)), right(model)


def pieces(model: nn.Module, **options: Any) -> tuple[nn.Module, list[float]]:
    low = mpcompile(model, strict=True, **options)
    return low, trained(low, adamw(low))


def generated(model: nn.Module, **options: Any) -> tuple[nn.Module, list[float]]:
    low = mpcompile(model, strict=True, **options)
    return low, trained(low, MPOptimizer(adamw(low)))


def whole(model: nn.Module, **options: Any) -> tuple[nn.Module, list[float]]:
    return model, trained_whole(model, adamw(model), strict=True, **options)


WAYS = {
    "O1": (pieces, {"level": "O1", "dtype": torch.bfloat16}),
    "O2-MPOptimizer": (generated, {"level": "O2", "dtype": torch.float16}),
    "O2-train_step": (whole, {"level": "O2", "dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_trains_as_in_fp32(way: str, in_fp32: tuple[list[float], float]) -> None:
    """Losses fall from ln 10 to a few hundredths; BF16 has 8 bits, and 48 steps add up."""
    train, options = WAYS[way]
    model, losses = train(network(), **options)
    wanted, told = in_fp32
    assert losses[0] == pytest.approx(wanted[0], rel=2.0**-6)
    assert sum(losses[-8:]) / 8 == pytest.approx(sum(wanted[-8:]) / 8, rel=0.1, abs=0.01)
    assert losses != wanted  # it was not in FP32
    assert right(model) >= told - 0.02


def test_an_evaluation_is_of_the_same_model() -> None:
    """A model in evaluation, with the weights of one that was trained in FP32."""
    model = network()
    trained(model, adamw(model))
    x, _ = digits()
    low = mpcompile(copy.deepcopy(model), level="O1", dtype=torch.bfloat16, strict=True).eval()
    with torch.no_grad():
        found, wanted = low(x[SEEN:]), model.eval()(x[SEEN:])
    assert not torch.equal(found, wanted)
    torch.testing.assert_close(
        found, wanted, rtol=2.0**-5, atol=2.0**-5 * float(wanted.abs().max())
    )


def _on_a_rank(rank: int, wanted: list[float]) -> None:
    model = DistributedDataParallel(network())
    low: Any = mpcompile(model, level="O1", dtype=torch.bfloat16, strict=True)
    losses = torch.tensor(trained(low, MPOptimizer(adamw(low)), slice(rank, None, 2)))
    dist.all_reduce(losses)
    torch.testing.assert_close(
        losses[-8:].mean() / 2, torch.tensor(wanted[-8:]).mean(), rtol=0.1, atol=0.01
    )


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_two_ranks_train_as_one_process(in_fp32: tuple[list[float], float]) -> None:
    on_each_rank(_on_a_rank, in_fp32[0])
