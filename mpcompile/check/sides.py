"""One program, run twice: by plain torch in FP64, and compiled by mpcompile.

A program takes a `Side` and asks it for models, optimizers, functions and tensors. What it returns
of both sides must be alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from ..api import mpcompile
from ..optim import MPOptimizer
from ..records import compiled_plans

__all__ = ["Results", "Side", "error_between"]

F = TypeVar("F", bound=Callable[..., Any])
Results: TypeAlias = "Sequence[torch.Tensor]"


class Side:
    """Makes what a program is made of.

    Args:
        dtype: the low dtype; None: FP64, by plain torch.
        **options: of `mpcompile()`.

    Attributes:
        dtype: the same.
        exact: whether this is the side in FP64.
    """

    def __init__(self, dtype: torch.dtype | None, **options: Any) -> None:
        self.dtype, self.exact = dtype, dtype is None
        self._options = {"dtype": dtype, "emit": "aot_eager", "strict": True, **options}
        self._compiled: list[Any] = []

    def plain(self, module: nn.Module) -> nn.Module:
        """A model with FP32 parameters that mpcompile doesn't compile."""
        return module.double() if self.exact else module

    def model(self, module: nn.Module, **more: Any) -> nn.Module:
        """A model with FP32 parameters that mpcompile compiles; `more`: options."""
        return self.compiled(self.plain(module), **more)

    def compiled(self, what: F, **more: Any) -> F:
        """A model or a function as it is compiled; on the exact side the same one."""
        if self.exact:
            return what
        made = mpcompile(what, **self._options, **more)
        self._compiled.append(made)
        return made

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """An optimizer as an `MPOptimizer`; on the exact side the same one."""
        return optimizer if self.exact else MPOptimizer(optimizer, emit=self._options["emit"])

    def random(self, *shape: int) -> torch.Tensor:
        """The next random numbers, the same on both sides but for their dtype."""
        numbers = torch.randn(*shape)
        return numbers.double() if self.exact else numbers

    def ran_low(self) -> bool:
        """Whether all that it compiled has operators in the low dtype."""
        plans = map(compiled_plans, self._compiled)
        return all(any(plan.counts().get("LOW") for plan in found) for found in plans)


def error_between(low: Results, exact: Results) -> float:
    """The largest difference of two results, relative to the largest element of each exact one.

    Args:
        low: of any dtypes.
        exact: as many, of the same shapes, in FP64; none is all zeros.

    Returns:
        Infinity if something in `low` is not finite.
    """
    worst = 0.0
    for one, true in zip(low, exact, strict=True):
        assert one.shape == true.shape, f"{one.shape}, {true.shape}"
        size = true.abs().max().item()
        assert size > 0, "zeros show nothing"
        error = (one.double() - true).abs().max().item() / size
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst
