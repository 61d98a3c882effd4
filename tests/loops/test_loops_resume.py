"""A run that is stopped and resumed in a new process ends as if it had not been, bit for bit."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import O1, O2, Way
from processes import python
from repository import ROOT, SUPPORT
from torch import nn
from trained_on_ranks import leaves

from mpcompile import LossScale, loss_scale_of

APART = pytest.mark.sweep("each way of training in processes of its own")

WAYS: dict[str, Way] = {"O1": O1, "O2": O2}
HALF, STEPS, PLANTED = 3, 6, 1


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 5)
    )


class Run:
    """Model, optimizer and schedule: what a training script makes before it loads anything."""

    def __init__(self, way: Way) -> None:
        # Growth every three good steps: at the third step after an overflow, which comes after
        # the checkpoint. So the end depends on how many good steps the checkpoint remembers.
        scale = LossScale.dynamic(init_scale=1024.0, growth_interval=3)
        self.model = way.model(network(), loss_scale=scale)
        self.optimizer = way.optimizer(
            torch.optim.AdamW(self.model.parameters(), lr=0.01), max_grad_norm=1.0
        )
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=0.02, total_steps=STEPS, cycle_momentum=False
        )

    def train(self, start: int, end: int) -> None:
        for step in range(start, end):
            torch.manual_seed(step)
            x, y = torch.randn(2, 8, 16), torch.randint(5, (2, 8))
            self.optimizer.zero_grad()
            for micro in range(2):
                loss = F.cross_entropy(self.model(x[micro]), y[micro]) / 2
                (loss * (1e30 if step == PLANTED else 1)).backward()
            self.optimizer.step()
            self.scheduler.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "scale": loss_scale_of(self.model).state_dict()}  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        loss_scale_of(self.model).load_state_dict(state["scale"])


def resume(folder: str) -> None:
    """What the new process does; its random numbers are seeded again in each step."""
    for name, way in WAYS.items():
        torch.manual_seed(123)  # other weights than those that were saved
        run = Run(way.again)
        run.load(torch.load(Path(folder, f"{name}.pt"), weights_only=True))
        run.train(HALF, STEPS)
        torch.save(run.state(), Path(folder, f"{name}_resumed.pt"))


def resume_here(folder: str) -> None:
    torch._dynamo.reset()
    resume(folder)


def resume_elsewhere(folder: str) -> None:
    path = os.pathsep.join(map(str, (Path(__file__).parent, SUPPORT, ROOT)))
    python("-c", f"import test_loops_resume as t; t.resume({folder!r})", PYTHONPATH=path)


@pytest.mark.slow("a loop in each way of training, against FP64")
@pytest.mark.parametrize("resumed_by", [resume_here, pytest.param(resume_elsewhere, marks=APART)])
def test_resumed(resumed_by: Callable[[str], None], tmp_path: Path) -> None:
    for name, way in WAYS.items():
        torch.manual_seed(0)
        run = Run(way.again)
        run.train(0, HALF)
        torch.save(run.state(), tmp_path / f"{name}.pt")
        run.train(HALF, STEPS)
        torch.save(run.state(), tmp_path / f"{name}_end.pt")
    resumed_by(str(tmp_path))
    for name in WAYS:
        check_resumed(tmp_path, name)


def check_resumed(folder: Path, name: str) -> None:
    middle, end, resumed = (
        torch.load(folder / f"{name}{which}.pt", weights_only=True)
        for which in ("", "_end", "_resumed")
    )
    assert leaves(resumed) == leaves(end)
    assert not torch.equal(end["model"]["0.weight"], middle["model"]["0.weight"])
    # Halved by the overflow, one good step before the checkpoint: doubled at the third one, and
    # not again, for there are two more.
    assert [(s["scale"]["scale"], s["scale"]["skipped_steps"]) for s in (middle, end)] == [
        (512.0, 1),
        (1024.0, 1),
    ]
