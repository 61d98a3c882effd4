"""What diagnose refuses, and what it says then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mpcompile import MPCompileError, diagnose


class Ones(nn.Module):
    """A model that is fine."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("one of a kind")


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "function": (lambda: diagnose(torch.sin, torch.ones(2)), "give an nn.Module"),  # type: ignore[arg-type]
    "steps": (lambda: diagnose(Ones(), torch.ones(4, 8), steps=0), "a whole number from 1"),
    "spelling": (lambda: diagnose(Ones(), torch.ones(4, 8), levle="O2"), "did you mean 'level'"),
    "O0": (lambda: diagnose(Ones(), torch.ones(4, 8), level="O0"), "nothing to diagnose"),
    "loss": (
        lambda: diagnose(Ones(), torch.ones(4, 8), loss_fn=lambda y: y),
        "loss_fn returned a tensor of shape",
    ),
    "no gradient": (
        lambda: diagnose(Ones(), torch.ones(4, 8), loss_fn=lambda y: y.detach().sum()),
        "it must make one number with a gradient",
    ),
    "copy": (lambda: diagnose(Uncopyable(4, 4), torch.ones(4, 4)), "one of a kind"),
    "closure": (
        lambda: diagnose(
            m := Ones(), torch.ones(4, 8), optimizer=torch.optim.LBFGS(m.parameters())
        ),
        "LBFGS runs the model again",
    ),
    "stranger": (
        lambda: diagnose(
            Ones(), torch.ones(4, 8), optimizer=torch.optim.SGD(Ones().parameters(), lr=1.0)
        ),
        "SGD holds no parameter of Ones",
    ),
    "optimizer": (lambda: diagnose(Ones(), torch.ones(4, 8), optimizer="adam"), "give a torch"),  # type: ignore[arg-type]
    "nothing": (
        lambda: diagnose(Ones().requires_grad_(False), torch.ones(4, 8)),
        "no parameter of Ones requires a gradient",
    ),
    "skipped": (lambda: diagnose(Skipped(), torch.ones(4, 8)), "no part of Skipped was compiled"),
}


class Skipped(Ones):
    @torch._dynamo.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str) -> None:
    call, said = REFUSED[name]
    with pytest.raises(MPCompileError, match=said):
        call()
