"""O2's working copies: training with them, next to FP32."""

import copy

import pytest
import torch

from mpcompile import MPOptimizer, mpcompile
from mpcompile.demo import GPT, GPTConfig
from mpcompile.scaling.copies import copies_of


@pytest.mark.slow("trainings that overflow, against FP64")
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
