"""Steps of a LightningModule that call one another, or are made by functools."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("lightning.pytorch")

from lightning_nets import FP16, FROM_LIGHTNING, Net, batches, made, trainer

from mpcompile import compiled_plans
from mpcompile.integrations.lightning import MPCompilePrecision

pytestmark = [pytest.mark.filterwarnings(line) for line in FROM_LIGHTNING]


def logged(kind: type[Any], **options: Any) -> tuple[Any, dict[str, float]]:
    """A module, trained, and what it logged last."""
    module, train = made(kind), trainer(**options)
    train.fit(module, batches(), batches())
    return module, {name: float(value) for name, value in train.logged_metrics.items()}


class Nested(Net):
    """Its training step isn't compiled, and calls a step that is."""

    @torch.compiler.disable
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("before", loss.detach() + 1)
        self.validation_step(batch, batch_idx)
        self.log("after", loss.detach() + 2)
        return loss


@pytest.mark.filterwarnings("ignore:mpcompile. 50% of the product FLOPs of Nested ran in compiled")
def test_a_step_that_calls_another_logs_all() -> None:
    """The step is not to be compiled, so its products run outside of the graphs."""
    _, plain = logged(Nested)
    precision = MPCompilePrecision(**{**FP16, "strict": False})
    module, ours = logged(Nested, plugins=[precision])
    assert set(plain) == {"before", "val_loss", "after"}
    assert ours == pytest.approx(plain, abs=0.01)
    assert "log" not in vars(module)


class Partial(Net):
    """Its steps are one method, in two stages."""

    def _step(self, batch: Any, batch_idx: int, *, stage: str) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log(stage, loss)
        return loss

    training_step = functools.partialmethod(_step, stage="train")  # type: ignore[assignment]
    validation_step = functools.partialmethod(_step, stage="test")  # type: ignore[assignment]


def test_steps_that_functools_made_are_compiled() -> None:
    _, plain = logged(Partial)
    module, ours = logged(Partial, plugins=[MPCompilePrecision(**FP16)])
    assert set(plain) == {"train", "test"}
    assert ours == pytest.approx(plain, abs=0.01)
    assert [plan.scaled for plan in compiled_plans(module)] == [False, True]
    assert all(plan.counts()["LOW"] > 0 for plan in compiled_plans(module))
