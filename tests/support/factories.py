"""Models that the command line is given, in files of the current directory."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

NETS = """
import torch
from torch import nn
from mpcompile import mpcompile

class Net(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.no_grad():
            self.down.weight.fill_(factor)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)) + 1000)

class Broken(Net):
    def forward(self, x):
        y = self.up(x)
        torch._dynamo.graph_break()
        return self.down(y)

def broken(): return Broken(), (torch.ones(8, 8),)
def good(): return Net(), (torch.ones(8, 8),)
def named(): return Net(), (), {"x": torch.ones(8, 8)}
def huge(): return Net(30.0), (torch.ones(8, 8),)
def compiled(): return mpcompile(Net(), dtype=torch.float16, level="O2"), (torch.ones(8, 8),)

def cubed(): return Net(), (torch.ones(8, 8),), {}, lambda y: y.sum() ** 3
def infinite(): return Net(), (torch.ones(8, 8),), {}, lambda y: y.sum() * float("inf")
def lossless(): return Net(), (torch.ones(8, 8),), {}, lambda y: y
def unnamed(): return Net(), (torch.ones(8, 8),), {}, 3
def five(): return Net(), (torch.ones(8, 8),), {}, None, None

def linear(): return nn.Linear(8, 8), (torch.ones(8, 8),)
def one(): return nn.Linear(8, 8)
def tensor(): return nn.Linear(8, 8), torch.ones(8, 8)
def swapped(): return (torch.ones(8, 8),), nn.Linear(8, 8)
def fails(): raise OSError("no such weights")
number = 3
net = nn.Linear(8, 8)
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The module `some_nets` in the current directory, forgotten afterwards; and one that fails."""
    (tmp_path / "some_nets.py").write_text(NETS)
    (tmp_path / "broken_nets.py").write_text("import not_there_either\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("some_nets", None)
    yield tmp_path
    sys.modules.pop("some_nets", None)


def squeezed(text: str) -> str:
    """The text with single spaces, wherever the terminal broke its lines."""
    return re.sub(r"\s+", " ", text)
