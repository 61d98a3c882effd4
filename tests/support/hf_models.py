"""Ten architectures of the zoo's, of Hugging Face's transformers."""

from typing import Any

import torch
from torch import nn

from benchmarks.zoo.catalogue import HUGGING_FACE

NAMES = (
    "gpt2", "llama", "mistral", "qwen3", "opt", "bert", "distilbert", "t5", "vit", "wav2vec2",
)  # fmt: skip


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and the arguments of a call that computes its loss."""
    entry = HUGGING_FACE[name]
    torch.manual_seed(0)
    return entry.build(), entry.draw(torch.Generator().manual_seed(1))
