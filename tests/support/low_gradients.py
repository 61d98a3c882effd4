"""What tests of working copies and of their gradients share: small models, compiled and held
by an `MPOptimizer`, a step of theirs, and their gradients compared with those of a reference.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mpcompile import LossScale, MPOptimizer, mpcompile

FP16 = torch.float16
HALVES = [torch.float16, torch.bfloat16]


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.fc1, self.norm = nn.Linear(8, width), nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.norm(self.fc1(x))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(tokens)))


def trained(
    model: nn.Module,
    scale: LossScale | None = None,
    dtype: torch.dtype = FP16,
    lr: float = 1e-3,
    **options: Any,
) -> MPOptimizer:
    """Compile the model in place, without breaks, and hold it."""
    if dtype is FP16:
        options["loss_scale"] = scale or LossScale.dynamic(init_scale=2.0**10)
    mpcompile(model, dtype=dtype, **{"level": "O2", "emit": "eager", "fullgraph": True, **options})
    return MPOptimizer(torch.optim.SGD(model.parameters(), lr=lr), emit="eager")


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int = 4) -> None:
    loss(model, rows).backward()
    optimizer.step()
    optimizer.zero_grad()


def check_against_fp64(
    model: nn.Module, run: Callable[[nn.Module], None], rtol: float = 1e-2
) -> list[str]:
    """Compare the gradients that a loop leaves with those it leaves in FP64, as `check` does."""
    reference = copy.deepcopy(model).double()
    run(model)
    run(reference)
    return check(model, reference, rtol)


def check(model: nn.Module, reference: nn.Module, rtol: float = 1e-2) -> list[str]:
    """Compare the gradients of two models. Returns the names of those that are stored low."""
    low = []
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        ours, wanted = p.grad, q.grad
        assert (ours is None) == (wanted is None), name
        if ours is not None and wanted is not None:
            assert (ours.double() - wanted).norm() <= rtol * wanted.norm(), name
            low += [name] if ours.dtype is not torch.float32 else []
    return low


MATRICES = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]  # all that has a copy


def inputs(net: nn.Module, rows: int = 4) -> torch.Tensor:
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
    return x.to(next(net.parameters()).dtype)


def loss(net: nn.Module, rows: int = 4) -> torch.Tensor:
    return net(inputs(net, rows)).square().mean()
