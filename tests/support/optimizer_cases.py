"""torch's own list of optimizers, every class with every configuration."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_optimizers import optim_db

REFUSED = ("LBFGS", "SparseAdam")
SHAPES = [(5, 7), (2, 3, 3, 3), (1,), (), (7, 1)]


@dataclass(frozen=True)
class Case:
    """One row of optim_db."""

    name: str
    make: Callable[..., torch.optim.Optimizer]
    settings: dict[str, Any]

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        settings = {k: v.clone() if torch.is_tensor(v) else v for k, v in self.settings.items()}
        return self.make(parameters, **settings)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [(5, 7), (3, 4), (1, 6)] if self.name == "Muon" else SHAPES


def cases(*, refused: bool = False) -> Iterator[tuple[str, Case]]:
    for info in optim_db:
        if (info.name in REFUSED) is not refused:
            continue
        for given in info.optim_inputs_func(device="cpu"):
            words = given.desc.replace(",", "").replace("/", "").split()
            yield "-".join([info.name, *words]), Case(info.name, info.optim_cls, given.kwargs)


# The row with the most settings stands for its class: the most branches of its step are taken.
RICHEST = {
    case.name: name for name, case in sorted(cases(), key=lambda pair: len(pair[1].settings))
}
