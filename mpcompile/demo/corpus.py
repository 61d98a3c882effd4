"""English text that is part of every Python installation, as batches of bytes.

The text is the language reference that ``help("topics")`` shows: about half a megabyte of prose
and code, with small differences between Python versions.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator

import torch
from torch import Tensor

HELD_OUT = 0.1


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text cut in two, as token numbers 0..255: int64, shapes (N,) and (M,)."""

    train: Tensor
    held_out: Tensor


def corpus() -> Corpus:
    """Load the text; the last tenth of it is held out.

    Topics are in alphabetical order, so the held-out part consists of whole topics of its own.
    """
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    # bytearray: torch needs a writable buffer.
    tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    cut = int(len(tokens) * (1 - HELD_OUT))
    return Corpus(train=tokens[:cut], held_out=tokens[cut:])


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


def held_out_batches(
    tokens: Tensor, *, batch: int, context: int, limit: int
) -> list[tuple[Tensor, Tensor]]:
    """Cut ``tokens`` into at most ``limit`` batches that do not overlap, from the start."""
    step = batch * context
    count = min(limit, (len(tokens) - 1) // step)
    if count < 1:
        raise ValueError(f"{len(tokens)} tokens are too few for {batch} sequences of {context}")
    end, shape = count * step, (count, batch, context)
    return list(zip(tokens[:end].view(shape), tokens[1 : end + 1].view(shape), strict=True))
