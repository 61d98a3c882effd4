"""Ten architectures of Hugging Face's transformers, small and with random weights.

Hidden size 40 (not a multiple of 16, as real models' odd sizes), two layers; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WORDS, LENGTH, ROWS = 99, 12, 2


def _ids() -> torch.Tensor:
    return torch.randint(3, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def _language(**more: Any) -> dict[str, Any]:
    ids = _ids()
    return {"input_ids": ids, "labels": ids, **more}


def _image() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32, generator=generator),
            "labels": torch.tensor([0, 1])}  # fmt: skip


def _made(name: str, config: str, inputs: dict[str, Any], **sizes: Any) -> tuple[nn.Module, Any]:
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, name)(getattr(transformers, config)(**sizes))
    model: nn.Module = made.train()
    return model, inputs


_TEXT = {
    "vocab_size": WORDS, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 72, "max_position_embeddings": 32,
}  # fmt: skip
_VISION = {
    "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 72,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip

MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "gpt2": lambda: _made(
        "GPT2LMHeadModel", "GPT2Config", _language(),
        vocab_size=WORDS, n_embd=40, n_layer=2, n_head=4, n_positions=32, bos_token_id=1,
        eos_token_id=2,
    ),
    "llama": lambda: _made(
        "LlamaForCausalLM", "LlamaConfig", _language(), **_TEXT, num_key_value_heads=2
    ),
    "mistral": lambda: _made(
        "MistralForCausalLM", "MistralConfig", _language(), **_TEXT, num_key_value_heads=2
    ),
    "qwen2": lambda: _made(
        "Qwen2ForCausalLM", "Qwen2Config", _language(), **_TEXT, num_key_value_heads=2
    ),
    "opt": lambda: _made(
        "OPTForCausalLM", "OPTConfig", _language(),
        vocab_size=WORDS, hidden_size=40, num_hidden_layers=2, num_attention_heads=4, ffn_dim=72,
        max_position_embeddings=32, word_embed_proj_dim=40,
    ),
    "bert": lambda: _made("BertForMaskedLM", "BertConfig", _language(), **_TEXT),
    "distilbert": lambda: _made(
        "DistilBertForMaskedLM", "DistilBertConfig", _language(),
        vocab_size=WORDS, dim=40, n_layers=2, n_heads=4, hidden_dim=72, max_position_embeddings=32,
    ),
    "t5": lambda: _made(
        "T5ForConditionalGeneration", "T5Config", _language(),
        vocab_size=WORDS, d_model=40, d_kv=10, num_layers=2, num_heads=4, d_ff=72,
        decoder_start_token_id=0,
    ),
    "vit": lambda: _made("ViTForImageClassification", "ViTConfig", _image(), **_VISION),
    "wav2vec2": lambda: _made(
        "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config",
        {"input_values": torch.randn(ROWS, 800, generator=torch.Generator().manual_seed(1)),
         "labels": torch.tensor([0, 1])},
        hidden_size=40, num_hidden_layers=2, num_attention_heads=4, intermediate_size=72,
        conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, mask_time_prob=0.0,
        classifier_proj_size=16, layerdrop=0.0,  # which layers run would depend on random values
    ),
}  # fmt: skip
