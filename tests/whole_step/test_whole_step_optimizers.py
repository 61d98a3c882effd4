"""Whole training steps with every optimizer of torch's own list."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from optimizer_cases import RICHEST, Case, cases
from torch import nn
from whole_steps import O1, O1_MP, O2, Run, Setting, agree, batches

BF16_MP = Setting("O2", torch.bfloat16, True)
BF16 = Setting("O1", torch.bfloat16, False)
SAMPLED = [
    pytest.param(case, id=name, marks=() if name in RICHEST.values() else pytest.mark.whole)
    for name, case in cases()
]


def classifier(case: Case) -> nn.Sequential:
    """Muon takes matrices alone."""
    bias = case.name != "Muon"
    return nn.Sequential(nn.Linear(16, 32, bias=bias), nn.GELU(), nn.Linear(32, 8, bias=bias))


def program(case: Case) -> Callable[[Run], Callable[..., torch.Tensor]]:
    def build(run: Run) -> Callable[..., torch.Tensor]:
        model = run.model(classifier(case))
        optimizer = run.optimizer(case.optimizer(list(model.parameters())))
        loss_of = run.forward(lambda x, y, factor: F.cross_entropy(model(x), y) * factor)

        def step(x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            loss = loss_of(x, y, factor)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return build


def is_rounded_apart(case: Case) -> bool:
    """Whether BF16 rounds a value of one neuron apart, where the weights of both ways differ in
    FP32's last bit: by 2**-8, which an update divided by a small root shows.
    """
    return case.name == "RMSprop" and bool(case.settings.get("maximize"))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("case", SAMPLED)
@pytest.mark.parametrize("setting", [O1, O1_MP, O2, BF16, BF16_MP], ids=str)
def test_as_in_pieces(case: Case, setting: Setting) -> None:
    scaled = setting.dtype is torch.float16
    near = {} if scaled or not is_rounded_apart(case) else {"rtol": 1e-2, "atol": 1e-3}
    run = agree(program(case), batches(4, factors={2: 1e30} if scaled else {}), setting, **near)
    if scaled:
        assert (run.scale.skipped_steps, run.scale.value) == (1, 512.0)
