"""Adapters of peft on a BF16 model of Hugging Face's: one line, and all products are low."""

import copy

import pytest
import torch

from mpcompile import MPOptimizer, compiled_plans, mpcompile

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("peft")
import peft
from transformers import LlamaConfig, LlamaForCausalLM

# torch warns, while Dynamo traces transformers, of what transformers does.
pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = 61


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16)


@pytest.mark.slow("trains by a trainer of others")
@pytest.mark.parametrize("wide", [True, False], ids=["adapters in FP32", "adapters in BF16"])
def test_lora(wide: bool) -> None:
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0,
        init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    model = peft.get_peft_model(llama(), config, autocast_adapter_dtype=wide)
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    assert trained == {torch.float32 if wide else torch.bfloat16}
    exact = copy.deepcopy(model).double()
    mpcompile(model, emit="aot_eager", strict=True)
    ids = torch.randint(WORDS, (2, 12))
    result = model(input_ids=ids, labels=ids, use_cache=False)
    result.loss.backward()
    exact(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert result.logits.dtype is torch.bfloat16
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert (p.grad is not None) == p.requires_grad, name
        if p.grad is not None:
            assert 0 < (p.grad.double() - q.grad).norm() < 0.05 * q.grad.norm(), name
    (plan,) = compiled_plans(model)
    products = [n for n in plan.nodes if n.op == "aten::linear"]
    assert len(products) > 20
    assert {n.precision for n in products} == {"LOW"}
    to_fp32 = [n for n in plan.nodes if n.rule == "cast" and n.planned.startswith("f32")]
    assert all("norm" in n.reads[0] for n in to_fp32 if n.reads[0].endswith("weight"))
    optimizer = MPOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), emit="eager")
    optimizer.step()
    held = optimizer.memory()
    share = sum(p.numel() for p in model.parameters() if p.requires_grad) / sum(
        p.numel() for p in model.parameters()
    )
    assert held["state"] == pytest.approx(8 * share, rel=0.05)
