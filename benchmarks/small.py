"""Networks of small matrix products: an MLP, a narrow transformer, an LSTM.

Below a hundred or so rows and columns, a product in BF16 may take longer than one in FP32, and a
cast as long as the product. What is won here is won by leaving things alone. On a GPU all of them
are launches of kernels that take no time: what counts is how many.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from benchmarks.harness.report import Report, Settings
from benchmarks.models import GPT2, MLP, Sample, Tagger
from benchmarks.step_times import Timed, Work, compare


def _transformer(width: int, length: int, layers: int = 2) -> functools.partial[GPT2]:
    return functools.partial(
        GPT2, vocab=128, context=length, width=width, layers=layers, heads=2, dropout=0.0,
        attention_dropout=0.0,
    )  # fmt: skip


def _tokens(batch: int, length: int, vocab: int, classes: int) -> Sample:
    return Sample((batch, length), (batch, length), classes, vocab)


WORK = Work(
    models=(
        Timed("MLP, B32 D32", functools.partial(MLP, inputs=32, width=32),
              Sample((32, 32), (32,), 10), steps=200),
        Timed("MLP, B64 D64", MLP, Sample((64, 64), (64,), 10), steps=200),
        Timed("GPT, B4 T32 D32 L2", _transformer(32, 32), _tokens(4, 32, 128, 128), steps=40),
        Timed("GPT, B8 T32 D64 L2", _transformer(64, 32), _tokens(8, 32, 128, 128), steps=40),
        Timed("LSTM tagger, B8 T16 D64", Tagger, _tokens(8, 16, 256, 16), steps=40),
    ),
    rounds=80,
)  # fmt: skip

NOTE = (
    "B examples, T tokens, width D, L layers; two heads, a vocabulary of 128 (256 for the LSTM). "
    "torch.compile leaves the graph at the LSTM, which then runs on torch's own kernel, as it does "
    "under mpcompile."
)

TINY = Work(
    models=(
        Timed("MLP", functools.partial(MLP, inputs=8, width=8, layers=1),
              Sample((4, 8), (4,), 10), steps=1),
        Timed("GPT", _transformer(16, 8, layers=1), _tokens(2, 8, 128, 128), steps=1),
        Timed("LSTM tagger", functools.partial(Tagger, width=8), _tokens(2, 4, 256, 16), steps=1),
    ),
    rounds=1,
    emit="eager",
)  # fmt: skip


def run(settings: Settings) -> Report:
    """Time each network; under `settings.quick` smaller ones, once, without compiling."""
    work = TINY if settings.quick else WORK
    return compare("small", "Networks of small matrix products", [NOTE], work, settings.device)


def rerun(device: torch.device) -> Report:
    """The same in fewer rounds, to be held against the committed ratios."""
    work = dataclasses.replace(WORK, rounds=20)
    return compare("small", "Networks of small matrix products", [NOTE], work, device)
