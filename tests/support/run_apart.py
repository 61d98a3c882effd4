"""A short training in a process of its own, for tests of what a user sees."""

import os

from processes import python

PROGRAM = """
import torch
from torch import nn
from mpcompile import LossScale, MPOptimizer, mpcompile

model = nn.Sequential(nn.Linear(16, 32), nn.Softmax(-1))
scale = LossScale.dynamic(2.0**10)
model = mpcompile(model, dtype=torch.float16, level="O2", emit="aot_eager", loss_scale=scale)
optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), emit="eager")
for factor in FACTORS:
    (model(torch.randn(8, 16)).square().mean() * factor).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def ran(before: str = "", factors: tuple[float, ...] = (1.0,), **variables: str) -> str:
    """What the program prints to standard error, in a process of its own."""
    code = before + PROGRAM.replace("FACTORS", repr(factors))
    not_asked = dict.fromkeys(name for name in os.environ if name.startswith("TORCH_"))
    return python("-c", code, **{**not_asked, **variables}).stderr
