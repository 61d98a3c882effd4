"""Training by Lightning: clipping, overflows, accumulation, manual optimization, checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_nets import FP16, FROM_LIGHTNING, Net, batches, distance, fitted, made, trainer
from torch import nn
from torch.utils.data import DataLoader

from mpcompile import LossScale, MPOptimizer, compiled_plans, loss_scale_of
from mpcompile.integrations.lightning import MPCompilePrecision

pytestmark = [pytest.mark.filterwarnings(line) for line in FROM_LIGHTNING]

# Rounded to FP16, a dozen steps at lr=0.1 stay this close; clipping at the wrong scale does not.
CLOSE = 2**-8

WAYS: dict[str, dict[str, Any]] = {
    "O1": {},
    "O2": {"level": "O2"},
    "O1, compiled optimizers": {"compile_optimizers": True},
    "O2, compiled optimizers": {"level": "O2", "compile_optimizers": True},
}
every_way = pytest.mark.parametrize("way", WAYS)


def plugin(way: str, **options: Any) -> dict[str, Any]:
    return {"plugins": [MPCompilePrecision(**{**FP16, **WAYS[way], **options})]}


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


CLIPPED: dict[str, dict[str, Any]] = {
    "not": {},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "norm, accumulated": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
}


@pytest.mark.slow("trains by a trainer of others")
@every_way
@pytest.mark.parametrize("clipped", CLIPPED)
def test_training_follows_fp32(way: str, clipped: str) -> None:
    plain = fitted(made(Scheduled), **CLIPPED[clipped])
    module = fitted(made(Scheduled), **CLIPPED[clipped], **plugin(way))
    assert 0 < distance(module, plain) < CLOSE
    if clipped != "not":
        assert distance(plain, fitted(made(Scheduled))) > 4 * CLOSE  # clipping is seen
    (optimizer,) = [module.optimizers(use_pl_optimizer=False)]
    assert isinstance(optimizer, MPOptimizer) == ("compiled" in way)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2  # the scheduler's


class Watching(Callback):
    """Notes the parameters after each batch."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.seen.append(torch.cat([p.detach().flatten() for p in module.parameters()]))


def with_overflow(at: int) -> DataLoader[Any]:
    """Batches of which one is too large for FP16."""
    data = batches()
    data.dataset.tensors[0][8 * at : 8 * at + 8] *= 1e6
    return data


@pytest.mark.slow_rows("trains by a trainer of others")
@every_way
@pytest.mark.parametrize("clipped", ["not", "value", "norm"])
def test_a_step_that_overflowed_changes_nothing(way: str, clipped: str) -> None:
    watching = Watching()
    module = made()
    options = {**CLIPPED[clipped], **plugin(way), "callbacks": [watching], "max_epochs": 1}
    fitted(module, with_overflow(at=3), **options)
    changed = [not a.equal(b) for a, b in zip(watching.seen, watching.seen[1:], strict=False)]
    assert changed == [True, True, False, True, True]
    assert loss_scale_of(module).skipped_steps == 1
    assert torch.isfinite(watching.seen[-1]).all()


class Adversaries(Net):
    """Two networks and two optimizers, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.parts = nn.ModuleDict({"judge": nn.Linear(4, 1)})

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = (
            F.cross_entropy(self(batch[0]), batch[1]) + self.parts["judge"](self(batch[0])).mean()
        )
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        judged = F.softplus(-self.parts["judge"](self(batch[0]).detach())).mean()
        second.zero_grad()
        self.manual_backward(judged)
        second.step()
        self.untoggle_optimizer(second)
        self.log_dict({"loss": loss, "judged": judged})
        self.losses += [float(loss.detach()), float(judged.detach())]

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net.parameters(), lr=0.1),
            torch.optim.SGD(self.parts.parameters(), lr=0.1),
        ]


@pytest.mark.slow("trains by a trainer of others")
@every_way
def test_manual_optimization_follows_fp32(way: str) -> None:
    plain = fitted(made(Adversaries))
    module = fitted(made(Adversaries), **plugin(way))
    assert module.losses == pytest.approx(plain.losses, abs=0.01)
    assert 0 < distance(module, plain) < CLOSE
    trained = [plan for plan in compiled_plans(module) if plan.scaled]
    assert {"net.0", "net.2", "parts.judge"} <= {n.module for p in trained for n in p.nodes}


# -- checkpoints -----------------------------------------------------------------------------------


def moving(way: str) -> dict[str, Any]:
    """A loss scale that doubles after four good steps, so that its state matters."""
    scale = LossScale.dynamic(init_scale=2.0**8, growth_interval=4)
    return plugin(way, loss_scale=scale)


@pytest.mark.slow("trains by a trainer of others")
@pytest.mark.sampled(2)
@every_way
def test_a_resumed_training_is_bit_equal(way: str, tmp_path: Path) -> None:
    data = with_overflow(at=1)
    whole = fitted(made(Scheduled), data, max_epochs=3, **moving(way))
    saving = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{step}")
    more = {"callbacks": [saving], "enable_checkpointing": True}
    fitted(made(Scheduled), data, max_epochs=2, **more, **moving(way))
    resumed = made(Scheduled)
    torch._dynamo.reset()
    trainer(max_epochs=3, **moving(way)).fit(
        resumed, data, batches(), ckpt_path=tmp_path / "step=6.ckpt"
    )
    assert distance(resumed, whole) == 0
    assert loss_scale_of(resumed).state == loss_scale_of(whole).state
    assert loss_scale_of(resumed).skipped_steps == 3


def test_the_gradscaler_of_a_checkpoint_is_taken_over(tmp_path: Path) -> None:
    theirs = trainer(
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 2.0**7))]
    )
    theirs.fit(made(), batches())
    theirs.save_checkpoint(tmp_path / "theirs.ckpt")
    module = made()
    ours = trainer(max_epochs=3, **plugin("O1"))
    ours.fit(module, batches(), ckpt_path=tmp_path / "theirs.ckpt")
    state = loss_scale_of(module).state
    assert (state.scale, state.good_steps) == (2.0**7, 18)


def test_a_checkpoint_goes_back_to_plain_lightning(tmp_path: Path) -> None:
    ours = trainer(**plugin("O2, compiled optimizers"))
    ours.fit(made(), batches())
    ours.save_checkpoint(tmp_path / "ours.ckpt")
    saved = torch.load(tmp_path / "ours.ckpt", weights_only=True)
    assert {v.dtype for v in saved["state_dict"].values()} == {torch.float32}
    plain = made()
    trainer(max_epochs=3).fit(plain, batches(), ckpt_path=tmp_path / "ours.ckpt")
    assert 0 < distance(plain, fitted(made(), max_epochs=3)) < CLOSE
