"""Optimizers that have a `train()` and an `eval()`: an MPOptimizer hands them on."""

import functools

import pytest
import torch
from torch import nn
from torch.optim import SGD
from twins import Twins

from mpcompile import MPOptimizer


class Averaged(SGD):
    """Swaps its parameters for their average in evaluation, as schedule-free optimizers do."""

    def eval(self) -> None:
        self._swap(training=False)

    def train(self) -> None:
        self._swap(training=True)

    @torch.no_grad()
    def _swap(self, *, training: bool) -> None:
        for group in self.param_groups:
            if group.get("training", True) is not training:
                for p in group["params"]:
                    p.lerp_(self.state[p]["momentum_buffer"], -1.0 if training else 0.5)
            group["training"] = training


def test_train_and_eval_are_handed_on() -> None:
    twins = Twins(functools.partial(Averaged, lr=0.1, momentum=0.9))
    twins.step()
    twins.step()
    trained = [p.detach().clone() for p in twins.mine]
    for optimizer in twins.both:
        optimizer.eval()  # type: ignore[attr-defined]
    twins.agree()
    assert not any(torch.equal(p, q) for p, q in zip(twins.mine, trained, strict=True))
    for optimizer in twins.both:
        optimizer.train()  # type: ignore[attr-defined]
    twins.step()
    twins.agree()


def test_only_an_optimizer_that_has_them_has_train_and_eval() -> None:
    optimizer = MPOptimizer(SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    assert not hasattr(optimizer, "train")
    with pytest.raises(AttributeError, match="'SGD' object has no attribute 'eval'"):
        optimizer.eval()
