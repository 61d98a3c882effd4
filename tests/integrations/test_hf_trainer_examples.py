"""The examples of Hugging Face's Trainer and of Accelerate, as a user would run them."""

import subprocess
import sys
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")

from examples import accelerate_loop, hf_trainer

# torch warns, while Dynamo traces transformers, of what transformers does.
pytestmark = [pytest.mark.slow("trains an example"), pytest.mark.filterwarnings("ignore")]

EXAMPLES = [pytest.param(hf_trainer, marks=pytest.mark.sweep("a whole training")), accelerate_loop]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda m: m.__name__)
def test_precision_moves_the_loss_less_than_a_seed_does(example: ModuleType) -> None:
    plain = [example.train(plain=True, seed=seed) for seed in range(3)]
    options = {"level": "O2", "dtype": torch.float16, "emit": "aot_eager", "strict": True}
    mixed = example.train(plain=False, seed=0, **options)
    assert abs(mixed - plain[0]) <= max(plain) - min(plain)


@pytest.mark.sweep("examples as they are, trained to their end")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda m: m.__name__)
def test_as_a_script(example: ModuleType) -> None:
    file = str(example.__file__)
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, check=True)
    assert "loss" in done.stdout
