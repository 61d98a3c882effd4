"""LightningModules, and a Trainer that prints and stores nothing."""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

# Warnings of Lightning's that say nothing about us.
FROM_LIGHTNING = (
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.*treespec, LeafSpec:FutureWarning",
    "ignore:.*LeafSpec. is deprecated:FutureWarning",
    "ignore:The number of training batches:UserWarning",
    "ignore:.*sync_dist=True:UserWarning",
    "ignore:You're resuming from a checkpoint that ended:UserWarning",
    "ignore:Be aware that when using .ckpt_path.:UserWarning",
    "ignore:You defined a .validation_step. but have no:UserWarning",
    "ignore:Checkpoint directory .* exists:UserWarning",
)

FP16: dict[str, Any] = {"dtype": torch.float16, "emit": "eager", "strict": True}


class Net(LightningModule):
    """A small classifier. It trains by SGD, so that two trainings stay as close as they start."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def predict_step(self, batch: Any) -> Any:
        return self(batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.automatic_optimization:
            self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def batches(count: int = 6, size: int = 8) -> DataLoader[Any]:
    """The same random batches at each call."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count * size, 16, generator=generator)
    y = torch.randint(4, (count * size,), generator=generator)
    return DataLoader(TensorDataset(x, y), size)


def made(kind: type[Any] = Net, *args: Any) -> Any:
    """A module with the same weights at each call."""
    torch.manual_seed(0)
    return kind(*args)


def trainer(kind: Any = Trainer, **options: Any) -> Any:
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return kind(**{"max_epochs": 2, "accelerator": "cpu", "devices": 1, **quiet, **options})


def fitted(module: Any, data: Any = None, **options: Any) -> Any:
    """The module, trained and validated."""
    data = batches() if data is None else data
    trainer(**options).fit(module, data, batches())
    return module


def distance(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between parameters of two modules."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)
