"""A small GPT, a text that needs no download, and the demo that trains one on the other.

`GPT`, `GPTConfig` and `text_batches` are plain PyTorch, free for benchmarks and tests to use;
the demo itself is ``mpcompile.demo.run``.
"""

from .model import GPT, GPTConfig, generate
from .text import Corpus, corpus, held_out_batches, text_batches

__all__ = [
    "GPT",
    "Corpus",
    "GPTConfig",
    "corpus",
    "generate",
    "held_out_batches",
    "text_batches",
]
