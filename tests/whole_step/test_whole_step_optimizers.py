"""Whole training steps with every optimizer of torch's own list."""

from collections.abc import Callable

import pytest
import torch
from optimizer_cases import RICHEST, Case, cases
from torch import nn
from whole_steps import O1, O1_MP, O2, O2_BF16, Run, Setting, agree, batches

REST = pytest.mark.sweep("all of torch's optimizer table")

pytestmark = pytest.mark.inside

BF16 = Setting("O1", torch.bfloat16, False)
SAMPLED = [
    pytest.param(case, id=name, marks=() if name in RICHEST.values() else REST)
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
        return run.usual(run.loss_of(model), optimizer)

    return build


def is_rounded_apart(case: Case) -> bool:
    """Whether BF16 rounds a value of one neuron apart, where the weights of both ways differ in
    FP32's last bit: by 2**-8, which an update divided by a small root shows.
    """
    return case.name == "RMSprop" and bool(case.settings.get("maximize"))


@pytest.mark.slow_rows("torch's optimizer table")
@pytest.mark.sampled(7)
@pytest.mark.parametrize("case", SAMPLED)
@pytest.mark.parametrize("setting", [O1, O1_MP, O2, BF16, O2_BF16], ids=str)
def test_as_in_pieces(case: Case, setting: Setting) -> None:
    scaled = setting.dtype is torch.float16
    near = {} if scaled or not is_rounded_apart(case) else {"rtol": 1e-2, "atol": 1e-3}
    run = agree(program(case), batches(4, factors={2: 1e30} if scaled else {}), setting, **near)
    if scaled:
        assert (run.scale.skipped_steps, run.scale.value) == (1, 512.0)
