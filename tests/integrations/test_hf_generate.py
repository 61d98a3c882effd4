"""`generate()` of a model that was trained: each token is a call without gradients."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
from small_gpt import LENGTH, gpt, rows

from mpcompile import MPOptimizer, mpcompile
from mpcompile.scaling import kept_copies

# torch warns, while Dynamo traces transformers, of what transformers does.
pytestmark = [
    pytest.mark.slow("generates text by transformers"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("wraps", [False, True])
def test_weights_are_cast_once_for_all_tokens(level: str, wraps: bool) -> None:
    model = mpcompile(gpt(), dtype=torch.bfloat16, level=level, emit="aot_eager")
    plain = torch.optim.AdamW(model.parameters(), lr=0.03)
    optimizer = MPOptimizer(plain, emit="eager") if wraps else plain
    words = torch.stack([row["input_ids"] for row in rows(16, 0)])
    prompt = words[:2, :4]
    for _ in range(2):
        model.train()
        for _ in range(20):
            model(input_ids=words, labels=words).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        found = generated(model, prompt)
        copies = [c for p in model.parameters() for c in kept_copies.copies_of(p).values()]
        writes = [copy_.stored._version for copy_ in copies]
        assert torch.equal(generated(model, prompt), found)
        assert [copy_.stored._version for copy_ in copies] == writes
        assert bool(copies) is not (wraps and level == "O2")  # else its own copies are read
        fresh = mpcompile(
            copy.deepcopy(model), dtype=torch.bfloat16, level=level, emit="aot_eager",
            disable_passes=["read_copies"],
        )  # fmt: skip
        assert torch.equal(generated(fresh, prompt), found)
    assert torch.equal(found, words[:2])  # it has learned the rows


def generated(model: torch.nn.Module, prompt: torch.Tensor) -> torch.Tensor:
    settings = {"max_length": LENGTH, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(prompt, **settings)
