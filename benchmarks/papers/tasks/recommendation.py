"""Recommendation: a DLRM on clicks that a hidden model of tastes makes.

The architecture is that of "Deep Learning Recommendation Model for Personalization and
Recommendation Systems" (Naumov et al., 2019): a bottom MLP for the numbers, an embedding for each
category, dot products of all pairs, a top MLP. Its dims are odd, as those of real tables are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.harness.ways import Trainer
from benchmarks.papers.task import Metrics, OneModel, Task

NUMBERS = 13
"""As many as Criteo's data have."""
CATEGORIES = (997, 311, 89, 41, 23, 7)
WIDTH = 27
BATCH = 256


class _Net(nn.Module):
    """Numbers (B, 13) and categories (B, 6) -> logits (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(NUMBERS, 63), nn.ReLU(), nn.Linear(63, WIDTH), nn.ReLU()
        )
        self.tables = nn.ModuleList(nn.Embedding(size, WIDTH) for size in CATEGORIES)
        for table in self.tables:
            assert isinstance(table, nn.Embedding)
            nn.init.uniform_(
                table.weight, -(table.num_embeddings**-0.5), table.num_embeddings**-0.5
            )
        vectors = len(CATEGORIES) + 1
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)
        self.top = nn.Sequential(
            nn.Linear(WIDTH + vectors * (vectors - 1) // 2, 95), nn.ReLU(),
            nn.Linear(95, 47), nn.ReLU(), nn.Linear(47, 1),
        )  # fmt: skip

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        bottom = self.bottom(numbers)
        looked_up = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([bottom, *looked_up], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        rows, columns = self.pairs.unbind()  # type: ignore[operator]
        logits: Tensor = self.top(torch.cat([bottom, products[:, rows, columns]], dim=1))
        return logits.squeeze(1)


@functools.cache
def _clicks(count: int = 120_000) -> TensorDataset:
    """Numbers (N, 13), FP32; categories (N, 6), int64; what was clicked (N,), FP32 of 0 and 1.

    Popular categories come up more often. Each has a hidden taste of 4 numbers; a click is drawn
    from what pairs of tastes, and the numbers, have in common.
    """
    generator = torch.Generator().manual_seed(2019)
    draw = functools.partial(torch.randn, generator=generator)
    popularity = [1 / torch.arange(1.0, size + 1) for size in CATEGORIES]
    categories = torch.stack(
        [torch.multinomial(p, count, replacement=True, generator=generator) for p in popularity], 1
    )
    numbers = draw(count, NUMBERS)
    tastes = [draw(size, 4) for size in CATEGORIES]
    vectors = [taste[categories[:, i]] for i, taste in enumerate(tastes)]
    vectors.append(torch.tanh(numbers @ draw(NUMBERS, 4) / 2))
    logits = sum(((a * b).sum(1) for a, b in itertools.combinations(vectors, 2)), torch.zeros(1))
    chance = torch.sigmoid(0.5 * logits - 1)  # about a third are clicked
    return TensorDataset(numbers, categories, torch.bernoulli(chance, generator=generator))


HELD_OUT = 4_000


class _Training(OneModel):
    def __init__(self, trainer: Trainer, seed: int) -> None:
        adagrad = functools.partial(torch.optim.Adagrad, lr=0.03)
        super().__init__(trainer, seed, _Net(), adagrad)

    def _draw(self, seed: int) -> Iterator[list[Tensor]]:
        return self._shuffled(seed, _clicks(), len(_clicks()), HELD_OUT, BATCH)

    def _loss(self, numbers: Tensor, categories: Tensor, clicked: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self._net(numbers, categories), clicked)

    @torch.no_grad()
    def judge(self) -> Metrics:
        numbers, categories, clicked = (part.to(self._device) for part in _clicks()[:HELD_OUT])
        logits = self._net.forward(numbers, categories)
        loss = F.binary_cross_entropy_with_logits(logits, clicked).item()
        finite = bool(logits.isfinite().all())
        area = float(roc_auc_score(clicked.cpu(), logits.cpu())) if finite else 0.5
        return {"held-out loss": loss, "AUC, %": 100 * area}


DLRM = Task(
    name="DLRM",
    claim="recommendation",
    data="generated: clicks drawn from hidden tastes of popular and rare categories",
    metric="AUC, %",
    higher=True,
    steps=1350,
    start=_Training,
)
