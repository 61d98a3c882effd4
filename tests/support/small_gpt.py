"""A small GPT of Hugging Face's, and its data."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

WORDS, LENGTH = 32, 12


def rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of words, each three further than the one before."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(WORDS, (count, 1), generator=generator)
    ids = (first + 3 * torch.arange(LENGTH)) % WORDS
    return [{"input_ids": row, "labels": row} for row in ids]


def gpt() -> GPT2LMHeadModel:
    set_seed(0)
    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": LENGTH}
    dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **dropout))
