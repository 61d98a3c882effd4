"""Inductor's kernels on a GPU against FP64, and the first compile of a fresh process.

pytest -m gpu
"""

import copy
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT
from torch import nn

from benchmarks.models import GPT2, MLP, Sample, Tagger, UNet, resnet18
from mpcompile import compiled_plans, mpcompile

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")

_GPT2 = functools.partial(GPT2, vocab=211, context=64, width=128, layers=2, heads=2)
MODELS: dict[str, tuple[Callable[[], nn.Module], Sample]] = {
    "mlp": (functools.partial(MLP, inputs=127, width=256), Sample((128, 127), (128,), 10)),
    "gpt": (_GPT2, Sample((4, 64), (4, 64), 211, vocab=211)),
    "resnet": (
        functools.partial(resnet18, width=16, depth=1),
        Sample((16, 3, 64, 64), (16,), 1000),
    ),
    "unet": (functools.partial(UNet, width=16, levels=2), Sample((4, 3, 32, 32), (4, 32, 32), 4)),
    "lstm": (functools.partial(Tagger, width=128), Sample((8, 24), (8, 24), 16, vocab=256)),
}
# Of all gradients together, relative to their norm: about twice what the same graphs come to on a
# CPU, op by op. A rounding in front of a ReLU may turn a sign, and batch norm makes more of it.
TOLERANCE = {
    torch.float16: {"mlp": 0.05, "gpt": 0.005, "resnet": 0.15, "unet": 0.06, "lstm": 0.005},
    torch.bfloat16: {"mlp": 0.1, "gpt": 0.02, "resnet": 0.4, "unet": 0.15, "lstm": 0.02},
}
OF_ONE = 0.45
"""Of each gradient alone: one that is twice or half the size of the true one is off by more."""


def loss_and_gradients(
    model: nn.Module, x: torch.Tensor, targets: torch.Tensor
) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(x, targets)
    loss.backward()
    grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), grads


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float16, marks=pytest.mark.by_gpu), torch.bfloat16]
)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_against_fp64(name: str, level: str, dtype: torch.dtype) -> None:
    build, sample = MODELS[name]
    torch.manual_seed(0)
    model = build().to(DEVICE)
    x, targets = sample.draw(DEVICE)
    exact = copy.deepcopy(model).double()
    wanted = loss_and_gradients(exact, x if sample.vocab else x.double(), targets)
    policy: dict[str, Any] = {"dtype": dtype, "level": level, "strict": True}
    loss, grads = loss_and_gradients(mpcompile(model, **policy), x, targets)
    assert loss == pytest.approx(wanted[0], rel=1e-3)
    assert grads.keys() == wanted[1].keys()
    for parameter, true in wanted[1].items():
        assert (grads[parameter] - true).norm() < OF_ONE * true.norm(), parameter
    ours, exact_ones = (torch.cat([g.flatten() for g in x.values()]) for x in (grads, wanted[1]))
    assert (ours - exact_ones).norm() < TOLERANCE[dtype][name] * exact_ones.norm()
    assert any(plan.tensor_cores.share > 0 for plan in compiled_plans(model)), "something ran low"


FIRST_COMPILE = """
import sys, torch
from torch import nn
from mpcompile import mpcompile
from mpcompile.compiler.entry_point import mpcompile_backend
how, device = sys.argv[1:]
net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8)).to(device)
if how == "backend":
    model = torch.compile(net, backend=mpcompile_backend, options={"dtype": torch.float16})
else:
    model = mpcompile(net, level=how, strict=True)
for _ in range(2):
    loss = model(torch.randn(32, 64, device=device)).square().mean()
    loss.backward()
print(all(bool(p.grad.isfinite().all()) and bool(p.grad.any()) for p in net.parameters()))
"""


@pytest.mark.parametrize("how", ["O0", "O1", "O2", "O3", "backend"])
def test_the_first_compile_of_a_fresh_process(how: str, tmp_path: Path) -> None:
    """With empty caches: nothing that an earlier compile has set up is there."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_COMPILE, how, str(DEVICE)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path),
             "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "True"
