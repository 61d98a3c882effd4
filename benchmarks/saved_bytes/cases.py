"""What is counted: the ways to train, the models and their batches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.models import GPT2, BERTEncoder, Sample, ViT, resnet50
from mpcompile.demo.model import GPT, GPTConfig

__all__ = [
    "AUTOCAST",
    "BUDGET",
    "CASES",
    "FP32",
    "HALF",
    "O1",
    "O2",
    "STEPPED",
    "TINY",
    "WAYS",
    "WITH_HEAD",
    "Case",
    "Way",
    "Work",
]

BUDGET = 0.5
"""The partitioner's activation_memory_budget in the arms that have one."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train a model.

    Attributes:
        level: mpcompile's; "": a peer.
        autocast, half: what the peer does.
        stepped: an `MPOptimizer` holds the parameters, so the model reads its low copies.
        fused: with the head and its loss fused.
        recompute: `recompute=True`; a peer gets the setting of torch's that it stands for.
        budget: the partitioner's activation_memory_budget; 1: it minimises bytes at no recompute
            of products.
    """

    name: str
    level: str = ""
    autocast: bool = False
    half: bool = False
    stepped: bool = False
    fused: bool = False
    recompute: bool = False
    budget: float = 1.0

    def at(self, budget: float) -> Way:
        return dataclasses.replace(self, name=f"{self.name}, budget {budget:g}", budget=budget)


FP32 = Way("compile FP32")
AUTOCAST = Way("compile + autocast", autocast=True)
HALF = Way("pure half", half=True)
O1 = Way("mpcompile O1", level="O1")
O2 = Way("mpcompile O2", level="O2")
STEPPED = Way("mpcompile O2, MPOptimizer", level="O2", stepped=True)
PEER_RECOMPUTES = dataclasses.replace(AUTOCAST, name=f"{AUTOCAST.name}, recompute", recompute=True)
RECOMPUTES = dataclasses.replace(STEPPED, name=f"{STEPPED.name}, recompute", recompute=True)
FUSED = dataclasses.replace(STEPPED, name=f"{STEPPED.name}, fused head", fused=True)
LEAST = dataclasses.replace(FUSED, name=f"{FUSED.name}, recompute", recompute=True)

WAYS = (FP32, AUTOCAST, PEER_RECOMPUTES, HALF, O1, O2, STEPPED, RECOMPUTES)
WITH_HEAD = (FUSED, LEAST)
BUDGETED = (AUTOCAST, PEER_RECOMPUTES, HALF, STEPPED, *WITH_HEAD)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its batch.

    Attributes:
        head: a large head and its loss: the arms that fuse them, and those under a budget.
    """

    name: str
    build: Callable[[], nn.Module]
    sample: Sample
    head: bool = False

    @property
    def ways(self) -> tuple[Way, ...]:
        if not self.head:
            return WAYS
        return (*WAYS, *WITH_HEAD, *(way.at(BUDGET) for way in BUDGETED))


def _tokens(batch: int, length: int, vocab: int, classes: int) -> Sample:
    return Sample((batch, length), (batch, length), classes, vocab)


def _images(batch: int, size: int = 224, classes: int = 1000) -> Sample:
    return Sample((batch, 3, size, size), (batch,), classes)


# No dropout: every arm would keep the same masks, a byte for each element. (And a CPU has no fused
# kernel for attention with dropout.)
STILL: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
CASES = (
    Case("GPT-2 124M, B16 T1024", functools.partial(GPT2, **STILL),
         _tokens(16, 1024, 50257, 50257), head=True),
    Case("BERT-large, B32 T512", functools.partial(BERTEncoder, **STILL),
         _tokens(32, 512, 30522, 2)),
    Case("ViT-B/16, B128", ViT, _images(128)),
    Case("ResNet-50, B256", resnet50, _images(256)),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Work:
    """What is counted: models too large to run here, and a GPT that runs."""

    cases: tuple[Case, ...] = CASES
    run: GPTConfig = GPTConfig(vocab=4099, context=128, width=256, layers=4, heads=4)
    batch: int = 8

    @property
    def small(self) -> Case:
        """The GPT that runs."""
        size = self.run
        return Case(
            f"GPT, B{self.batch} T{size.context} D{size.width} L{size.layers} V{size.vocab}",
            lambda: GPT(size),
            _tokens(self.batch, size.context, size.vocab, size.vocab),
        )


TINY = Work(
    cases=(
        Case("GPT-2, tiny", functools.partial(GPT2, vocab=61, context=16, width=32, layers=1,
             heads=2, **STILL), _tokens(2, 16, 61, 61), head=True),
    ),
    run=GPTConfig(vocab=61, context=16, width=32, layers=1, heads=2),
    batch=2,
)  # fmt: skip
