"""What the documents take as given, and how their blocks are run."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from mpcompile import MPOptimizer
from mpcompile.settings import Settings

Names = dict[str, Any]


def run(documented: list[str], names: Names) -> Names:
    """Run blocks one after the other over the same names, and return these."""
    for number, block in enumerate(documented):
        exec(compile(block, f"block {number}", "exec"), names)
    return names


class Net(nn.Module):
    """What the documents' pages call `model`: (B, 16) -> (B, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16)])
        self.lm_head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.up(x))
        for block in self.blocks:
            x = x + torch.nn.functional.gelu(block(x))
        return self.lm_head(x)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a block compiles is run by `emit="eager"`, unless the block says otherwise."""

    def parse(request: Names) -> Settings:
        asked = request.get("emit") == "inductor" and not request.get("recompute")
        return plain({**request, "emit": "eager"} if asked else request)

    plain, made = Settings.parse, functools.partialmethod(MPOptimizer.__init__, emit="eager")
    monkeypatch.setattr(Settings, "parse", parse)
    monkeypatch.setattr(MPOptimizer, "__init__", made)
