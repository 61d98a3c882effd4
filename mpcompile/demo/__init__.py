"""A small GPT, a text that needs no download, and the demo that trains one on the other.

`GPT`, `GPTConfig` and `text_batches` are plain PyTorch, free for benchmarks and tests to use;
the demo itself is ``mpcompile.demo.run``.
"""

from .corpus import corpus, text_batches
from .gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig", "corpus", "text_batches"]
