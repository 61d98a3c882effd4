"""A plain torch.optim optimizer and an MPOptimizer over equal parameters, stepped side by side."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mpcompile import MPOptimizer

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SHAPES = ((3, 4), (5,), ())


class Twins:
    """Two optimizers of one kind; `theirs` is eager PyTorch's and always right.

    Args:
        make: an optimizer over the parameters it is given.
        tensors: what the parameters start from; by default a matrix, a vector and a number.
        options: for MPOptimizer; `emit` is "eager" by default.
    """

    def __init__(
        self, make: Make, tensors: Sequence[torch.Tensor] | None = None, **options: Any
    ) -> None:
        tensors = tensors if tensors is not None else [torch.randn(s) for s in SHAPES]
        self.mine, self.theirs = ([nn.Parameter(_same(t)) for t in tensors] for _ in range(2))
        self.optimizer = MPOptimizer(make(self.mine), **{"emit": "eager", **options})
        self.reference = make(self.theirs)

    @property
    def both(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return self.reference, self.optimizer

    def give(self, gradients: Sequence[torch.Tensor | None] | None = None) -> None:
        """Set both sides' gradients; random ones by default."""
        if gradients is None:
            gradients = [torch.randn_like(p) for p in self.mine]
        for p, q, g in zip(self.mine, self.theirs, gradients, strict=True):
            p.grad, q.grad = (None, None) if g is None else (_same(g), _same(g))

    def step(self, gradients: Sequence[torch.Tensor | None] | None = None) -> None:
        self.give(gradients)
        for optimizer in self.both:
            optimizer.step()

    def train(self, steps: int = 3) -> None:
        """Steps with random gradients, after which both agree."""
        for _ in range(steps):
            self.step()
        self.agree()

    def step_clipped(
        self, to: float, gradients: Sequence[torch.Tensor | None] | None = None, **tolerance: float
    ) -> None:
        """A step that clips the gradients; `optimizer` does so by itself, and tells their norm."""
        self.give(gradients)
        norm = nn.utils.clip_grad_norm_(self.theirs, to)
        for optimizer in self.both:
            optimizer.step()
        torch.testing.assert_close(self.optimizer.grad_norm, norm.float(), **tolerance)

    def agree(self, **tolerance: float) -> None:
        """Assert that parameters and states are equal; by default within FP32 rounding."""
        tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
        for p, q in zip(self.mine, self.theirs, strict=True):
            torch.testing.assert_close(p, q, **tolerance)
            mine, theirs = self.optimizer.state.get(p, {}), self.reference.state.get(q, {})
            torch.testing.assert_close(dict(mine), dict(theirs), **tolerance)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of the same layout, gaps included."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copy.copy_(tensor) if 0 not in tensor.stride() else tensor
