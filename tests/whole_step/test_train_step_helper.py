"""`train_step(model, optimizer, loss_fn)`: the step of a plain loop, as one function."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_of import module_of
from torch import nn

from mpcompile import LossScale, MPCompileError, MPOptimizer, compiled_plans, mpcompile, train_step


def two_inputs() -> Any:
    return module_of(
        lambda m, x, shift: m.last(F.gelu(m.first(x) + shift)),
        first=nn.Linear(16, 32), last=nn.Linear(32, 8),
    )  # fmt: skip


def options() -> dict[str, Any]:
    scale = LossScale.dynamic(init_scale=1024.0)
    return {"level": "O2", "emit": "aot_eager", "loss_scale": scale}


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_is_the_loop_that_one_would_write(accumulate: int) -> None:
    model = two_inputs()
    other = copy.deepcopy(model)
    optimizer = MPOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), emit="eager")
    others = MPOptimizer(torch.optim.AdamW(other.parameters(), lr=1e-2), emit="eager")
    step = train_step(model, optimizer, F.cross_entropy, accumulate=accumulate, **options())
    other = mpcompile(other, **options())
    for _ in range(4):
        x, shift, y = torch.randn(8, 16), torch.randn(8, 32), torch.randint(0, 8, (8,))
        loss = step(x, shift, y)
        expected = torch.zeros(())
        for part in zip(*(one.chunk(accumulate) for one in (x, shift, y)), strict=True):
            one = F.cross_entropy(other(*part[:-1]), part[-1]) / accumulate
            one.backward()
            expected += one.detach()
        others.step()
        others.zero_grad()
        # In pieces at O2, the sum of two gradients has the low dtype.
        loose: dict[str, float] = {"rtol": 1e-2, "atol": 1e-3} if accumulate > 1 else {}
        torch.testing.assert_close(loss, expected, **loose)
        assert not loss.requires_grad
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, **loose)
            assert p.grad is None
    assert step.left is None  # type: ignore[attr-defined]


def test_a_batch_that_cannot_be_split() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = train_step(model, optimizer, F.mse_loss, accumulate=3, **options())
    with pytest.raises(MPCompileError, match="accumulate=3 can't split a batch of 4 into"):
        step(torch.zeros(4, 4), torch.zeros(4, 4))
    assert model.weight.grad is None


def test_a_compiled_model_keeps_its_options() -> None:
    """Without options of the step's own: dtype=torch.bfloat16 isn't the default of a CPU."""
    model = mpcompile(two_inputs(), dtype=torch.bfloat16, level="O2", emit="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batch = torch.randn(8, 16), torch.randn(8, 32), torch.randint(0, 8, (8,))
    for step, low, level in (
        (train_step(model, optimizer, F.cross_entropy), "bfloat16", "O2"),
        (train_step(model, optimizer, F.cross_entropy, dtype="fp16"), "float16", "O2"),
        (train_step(model, optimizer, F.cross_entropy, level="O0"), "float32", "O0"),
    ):
        step(*batch)
        plans = compiled_plans(step)
        assert {plan.level for plan in plans} == {level}
        assert {plan.dtype for plan in plans} == {low}
