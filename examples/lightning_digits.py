"""Train a classifier of handwritten digits with Lightning, in mixed precision.

    pip install 'mpcompile[lightning]' scikit-learn
    python examples/lightning_digits.py

One line differs from a training in FP32: `plugins=[MPCompilePrecision()]`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from mpcompile.integrations.lightning import MPCompilePrecision


class Digits(LightningModule):
    """Classifies images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
            nn.Linear(512, 10),
        )  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        out = self.net(images)
        self.log("val_loss", F.cross_entropy(out, labels))
        self.log("val_accuracy", (out.argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images to train on and 360 to test on, [n, 1, 8, 8] between 0 and 1."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(
        torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    )
    train, test = random_split(data, [1437, 360], torch.Generator().manual_seed(0))
    return train, test  # type: ignore[return-value]


def train(seed: int = 0, **options: Any) -> dict[str, float]:
    """Train with these options of the Trainer; returns what was logged last."""
    seed_everything(seed)
    train_data, test_data = digits()
    silent = {"logger": False, "enable_checkpointing": False}
    trainer = Trainer(**{"max_epochs": 3, "devices": 1, **silent, **options})
    trainer.fit(
        Digits(),
        DataLoader(train_data, batch_size=32, shuffle=True, drop_last=True),
        DataLoader(test_data, batch_size=360),
    )
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    print(train(plugins=[MPCompilePrecision()]))  # in FP32: print(train())
