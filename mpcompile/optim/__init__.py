"""The generated optimizer step: a torch.optim step traced, rewritten and compiled."""

from .optimizer import MPOptimizer

__all__ = ["MPOptimizer"]
