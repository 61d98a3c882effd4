"""Examples of Hugging Face's Trainer and of Accelerate, as they are run, or with fewer steps."""

from types import ModuleType

import pytest
import torch
from processes import python

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
    assert "loss" in python(str(example.__file__)).stdout


def test_masters_keep_what_bf16_weights_lose() -> None:
    pytest.importorskip("peft")
    from examples import finetune_bf16

    found = finetune_bf16.compare(80, emit="eager")
    plain, hand, ours = (found[name] for name in ("bf16, plain", "by hand", "mpcompile"))
    trainer = found["Trainer, bf16=True"]
    gained = plain.loss - hand.loss
    assert gained > 1.0
    assert ours.loss == pytest.approx(hand.loss, abs=0.02 * gained)
    assert ours.loss == pytest.approx(trainer.loss, abs=0.05 * gained)
    # Weights, gradients, moments; and masters; and gradients in FP32 for these.
    assert plain.bytes == pytest.approx(2 + 2 + 8 / 2, abs=0.01)
    assert ours.bytes == pytest.approx(2 + 2 + 4 + 8, abs=0.01)
    assert hand.bytes == pytest.approx(2 + 2 + 4 + 4 + 8, abs=0.01)
    assert trainer.bytes == pytest.approx(4 + 4 + 8, abs=0.01)
    low, wide = found["LoRA, mpcompile"], found["LoRA, Trainer, bf16=True"]
    assert low.loss == pytest.approx(wide.loss, rel=0.2)
    assert 2.0 < low.bytes < wide.bytes - 1.8  # two bytes less for each weight of the base
