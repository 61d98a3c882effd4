"""O2's working copies: training with them, next to FP32."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from copied_models import HALVES, Net, trained
from torch import nn

from mpcompile import LossScale, MPOptimizer, mpcompile
from mpcompile.demo import GPT, GPTConfig
from mpcompile.scaling.copies import copies_of


@pytest.mark.parametrize("dtype", HALVES)
def test_training_follows_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    reference, data = Net(), torch.randn(30, 16, 8)
    model, optimizer = trained(copy.deepcopy(reference), dtype, max_grad_norm=1.0)
    plain = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for x in data:
        y = x[:, :4].sin()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted = F.mse_loss(reference(x), y)
        wanted.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
    assert abs(loss - wanted) < 0.02 * wanted


@pytest.mark.parametrize("emit", ["aot_eager", "inductor"])
def test_compiled_training_follows_the_same_graph_run_as_it_is(emit: str) -> None:
    torch.manual_seed(0)
    start = GPT(GPTConfig(vocab=61, context=16, width=32, layers=1, heads=2))
    tokens = torch.randint(61, (3, 2, 16))
    losses = []
    for how in ("eager", emit):
        model = mpcompile(
            copy.deepcopy(start), level="O2", dtype=torch.bfloat16, emit=how, strict=True
        )
        optimizer = MPOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), emit=how)
        for x in tokens:
            loss = model(x, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        assert any(copies_of(p) for p in model.parameters())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=0)


def test_an_overflow_changes_neither_masters_nor_copies() -> None:
    scale = LossScale.dynamic(init_scale=2.0**24)
    model = mpcompile(Net(), level="O2", dtype=torch.float16, emit="eager", loss_scale=scale)
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), emit="eager")
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(4, 8)).mean().backward()
    optimizer.step()
    assert optimizer.skipped
    assert scale.value == 2.0**23
    assert scale.skipped_steps == optimizer.skipped_steps == 1
    for p, b in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, b)
        for kept in copies_of(p).values():
            assert torch.equal(kept.tensor, b.half())
