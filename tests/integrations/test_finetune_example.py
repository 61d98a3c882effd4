"""examples/finetune_bf16.py, with fewer steps."""

import pytest

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

from examples import finetune_bf16

pytestmark = [pytest.mark.slow("trains an example"), pytest.mark.filterwarnings("ignore")]


def test_masters_keep_what_bf16_weights_lose() -> None:
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
