"""The example for Lightning trains as well in mixed precision as in FP32."""

import pytest
import torch

pytest.importorskip("lightning.pytorch")
pytest.importorskip("sklearn")

from lightning_nets import FROM_LIGHTNING

from examples import lightning_digits
from mpcompile.integrations.lightning import MPCompilePrecision

pytestmark = [
    *[pytest.mark.filterwarnings(line) for line in FROM_LIGHTNING],
    pytest.mark.filterwarnings("ignore:GPU available but not used:UserWarning"),
]


@pytest.mark.sweep("trainings to their end")
def test_its_losses_are_within_the_spread_of_fp32() -> None:
    train = lightning_digits.train
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    in_fp32 = [train(seed, **quiet) for seed in range(3)]
    losses = [one["val_loss"] for one in in_fp32]
    spread = max(losses) - min(losses)
    for options in ({}, {"level": "O2", "compile_optimizers": True}):
        fp16 = {"dtype": torch.float16, "emit": "aot_eager", "strict": True}
        plugin = MPCompilePrecision(**fp16, **options)
        logged = train(0, plugins=[plugin], **quiet)
        assert 0 < abs(logged["val_loss"] - losses[0]) < spread
        assert logged["val_accuracy"] > 0.95
