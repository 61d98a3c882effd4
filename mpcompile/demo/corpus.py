"""English text that is part of every Python installation, as batches of bytes.

The text is the language reference that ``help("topics")`` shows: about half a megabyte of prose
and code, with small differences between Python versions.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import torch
from torch import Tensor


def corpus() -> Tensor:
    """Load the text, as token numbers 0..255: int64, shape (N,)."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    # bytearray: torch needs a writable buffer.
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def text_batches(
    tokens: Tensor, *, batch: int, context: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``(idx, targets)`` forever, both (batch, context) int64, from random positions.

    The same seed gives the same batches in the same order, on every platform and device.

    Raises:
        ValueError: ``tokens`` is too short for one sequence.
    """
    last = len(tokens) - context - 1
    if last < 0:
        raise ValueError(f"{len(tokens)} tokens are too few for a context of {context}")
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context + 1)
    while True:
        starts = torch.randint(last + 1, (batch,), generator=generator)
        window = tokens[starts[:, None] + offsets]
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
