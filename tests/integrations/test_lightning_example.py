"""The example for Lightning trains as well in mixed precision as in FP32."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch")

from lightning_nets import FROM_LIGHTNING
from repository import ROOT

from mpcompile.integrations.lightning import MPCompilePrecision

pytestmark = [
    *[pytest.mark.filterwarnings(line) for line in FROM_LIGHTNING],
    pytest.mark.filterwarnings("ignore:GPU available but not used:UserWarning"),
]
EXAMPLE = ROOT / "examples" / "lightning_digits.py"


def example(path: Path = EXAMPLE) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.sweep("trainings to their end")
def test_its_losses_are_within_the_spread_of_fp32() -> None:
    train = example().train
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
