"""A short training in a process of its own, for tests of what a user sees."""

import os
import subprocess
import sys

from repository import ROOT

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
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_")}
    environment = {**kept, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr
