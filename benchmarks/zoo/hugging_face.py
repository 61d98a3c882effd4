"""Language models of Hugging Face's: encoders, decoders, encoder-decoders."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.zoo.making import (
    ROWS,
    TEXT,
    VISION,
    WORDS,
    Entry,
    Inputs,
    hugging_face,
    image,
    language,
    translation,
    waveform,
)


def _maker(
    kind: str, head: str, draw: Callable[[torch.Generator], Inputs] = language
) -> Callable[..., Entry]:
    """What makes an entry of a model's name, as "Bert", and its sizes."""

    def make(stem: str, **sizes: object) -> Entry:
        return hugging_face(kind, f"{stem}For{head}", f"{stem}Config", draw, **sizes)

    return make


_encoder = _maker("encoder", "MaskedLM")
_decoder = _maker("decoder", "CausalLM")
_both = _maker("encoder-decoder", "ConditionalGeneration", translation)
_vision = _maker("vision", "ImageClassification", image())
_audio = _maker("audio", "SequenceClassification", waveform())
_experts = _maker("mixture of experts", "CausalLM")
_states = _maker("state space", "CausalLM")

_GROUPED = {**TEXT, "num_key_value_heads": 1}
_BART = {
    "vocab_size": WORDS, "d_model": 36, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 50,
    "decoder_ffn_dim": 50, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
_T5 = {
    "vocab_size": WORDS, "d_model": 36, "d_kv": 12, "num_layers": 1, "num_heads": 3, "d_ff": 50,
    "decoder_start_token_id": 0,
}  # fmt: skip

ENCODERS = {
    "bert": _encoder("Bert", **TEXT),
    "electra": _encoder("Electra", **TEXT, embedding_size=20),
    "albert": _encoder("Albert", **TEXT, embedding_size=20),
    "mpnet": _encoder("MPNet", **TEXT),
    "deberta_v2": _encoder(
        "DebertaV2", **TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"],
        position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True,
    ),
    "distilbert": _encoder(
        "DistilBert", vocab_size=WORDS, dim=36, n_layers=2, n_heads=3, hidden_dim=50,
        max_position_embeddings=32,
    ),
    "modernbert": _encoder(
        "ModernBert", **TEXT, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
        sep_token_id=2, local_attention=6, global_attn_every_n_layers=2,
        attn_implementation="sdpa",
    ),
    "fnet": _encoder("FNet", **{k: v for k, v in TEXT.items() if k != "num_attention_heads"}),
}  # fmt: skip

DECODERS = {
    "gpt2": hugging_face(
        "decoder", "GPT2LMHeadModel", "GPT2Config", language, vocab_size=WORDS, n_embd=36,
        n_layer=2, n_head=3, n_positions=32, bos_token_id=1, eos_token_id=2,
    ),
    "llama": _decoder("Llama", **_GROUPED),
    "mistral": _decoder("Mistral", **_GROUPED, sliding_window=5),
    "qwen3": _decoder("Qwen3", **_GROUPED, head_dim=12),
    "gemma2": _decoder("Gemma2", **_GROUPED, head_dim=12, sliding_window=5,
                       query_pre_attn_scalar=12),
    "phi": _decoder("Phi", **TEXT),
    "gpt_neox": _decoder("GPTNeoX", **TEXT),
    "bloom": _decoder("Bloom", vocab_size=WORDS, hidden_size=36, n_layer=2, n_head=3),
    "falcon": _decoder("Falcon", **{**TEXT, "ffn_hidden_size": 50}),
    "opt": _decoder(
        "OPT", vocab_size=WORDS, hidden_size=36, num_hidden_layers=2, num_attention_heads=3,
        ffn_dim=50, max_position_embeddings=32, word_embed_proj_dim=36,
    ),
    "olmo2": _decoder("Olmo2", **_GROUPED),
}  # fmt: skip

ENCODER_DECODERS = {
    "t5": _both("T5", **_T5),
    "bart": _both("Bart", **_BART),
    "m2m_100": _both("M2M100", **_BART),
    "longt5": _both("LongT5", **_T5, local_radius=4),
}


# -- beyond text -----------------------------------------------------------------------------------
# Hugging Face's vision and audio models, mixtures of experts and state space models.


def _spectrum(generator: torch.Generator) -> Inputs:
    """For Whisper: 30 frames of 10 bins, and a text."""
    text = torch.randint(3, WORDS, (ROWS, 7), generator=generator)
    return {"input_features": torch.randn(ROWS, 10, 30, generator=generator), "labels": text}


def _frames(generator: torch.Generator) -> Inputs:
    """For the audio spectrogram transformer: 25 frames of 18 bins."""
    values = torch.randn(ROWS, 25, 18, generator=generator)
    return {"input_values": values, "labels": torch.tensor([0, 1])}


# How transformers calls the experts. torch's grouped product wants strides of 16 bytes.
_GROUPED_MM = {**_GROUPED, "hidden_size": 24, "intermediate_size": 56}
_BATCHED_MM = {**_GROUPED, "experts_implementation": "batched_mm"}
_ONE_BY_ONE = {**_GROUPED, "experts_implementation": "eager"}
_WAVES = {
    "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 50,
    "conv_dim": (18, 18), "conv_kernel": (10, 3), "conv_stride": (5, 2),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 15, "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 18,
}  # fmt: skip

VISIONS = {
    "vit": _vision("ViT", **VISION),
    "beit": _vision("Beit", **VISION),
    "dinov2": _vision("Dinov2", **VISION),
    "swin": _vision("Swin", image_size=33, patch_size=3, embed_dim=18, depths=[2, 2],
                    num_heads=[2, 3], window_size=3),
    "convnext": _vision("ConvNext", hidden_sizes=[18, 36], depths=[1, 1], num_stages=2),
    "resnet": _vision("ResNet", embedding_size=18, hidden_sizes=[18, 36], depths=[2, 2],
                      layer_type="basic"),
    "segformer": _vision("Segformer", num_encoder_blocks=2, depths=[2, 2], hidden_sizes=[18, 36],
                         num_attention_heads=[2, 3], sr_ratios=[4, 2], patch_sizes=[7, 3],
                         strides=[4, 2], mlp_ratios=[2, 2]),
    "poolformer": _vision("PoolFormer", num_encoder_blocks=2, depths=[2, 2], hidden_sizes=[18, 36],
                          patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1], mlp_ratio=2.0),
}  # fmt: skip

AUDIO = {
    "wav2vec2": _audio("Wav2Vec2", **_WAVES),
    "whisper": hugging_face(
        "audio", "WhisperForConditionalGeneration", "WhisperConfig", _spectrum, vocab_size=WORDS,
        num_mel_bins=10, d_model=36, encoder_layers=1, decoder_layers=1, encoder_attention_heads=3,
        decoder_attention_heads=3, encoder_ffn_dim=50, decoder_ffn_dim=50, max_source_positions=15,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    ),
    "ast": hugging_face(
        "audio", "ASTForAudioClassification", "ASTConfig", _frames, hidden_size=36,
        num_hidden_layers=2, num_attention_heads=3, intermediate_size=50, patch_size=7,
        frequency_stride=5, time_stride=5, max_length=25, num_mel_bins=18,
    ),
}  # fmt: skip

EXPERTS = {
    "mixtral": _experts("Mixtral", **_GROUPED_MM, num_local_experts=3, num_experts_per_tok=2),
    "qwen2_moe": _experts("Qwen2Moe", **_BATCHED_MM, num_experts=3, num_experts_per_tok=2,
                          moe_intermediate_size=22, shared_expert_intermediate_size=26),
    "olmoe": _experts("Olmoe", **_ONE_BY_ONE, num_experts=3, num_experts_per_tok=2),
    "deepseek_v2": _experts(
        "DeepseekV2", **{**_BATCHED_MM, "num_key_value_heads": 3}, first_k_dense_replace=1,
        moe_intermediate_size=22, n_routed_experts=3, num_experts_per_tok=2, n_shared_experts=1,
        n_group=1, topk_group=1, kv_lora_rank=18, q_lora_rank=20, qk_nope_head_dim=10,
        qk_rope_head_dim=6, v_head_dim=14, head_dim=6,
    ),
}  # fmt: skip

STATE_SPACES = {
    "mamba": _states("Mamba", vocab_size=WORDS, hidden_size=36, num_hidden_layers=2, state_size=6,
                     use_cache=False),
    "mamba2": _states("Mamba2", vocab_size=WORDS, hidden_size=36, num_hidden_layers=2, num_heads=6,
                      head_dim=12, state_size=6, n_groups=1, chunk_size=5, use_cache=False),
    "rwkv": _states("Rwkv", vocab_size=WORDS, hidden_size=36, num_hidden_layers=2,
                    intermediate_size=50, context_length=32, use_cache=False),
    "recurrent_gemma": _states("RecurrentGemma", **_GROUPED, lru_width=36,
                               attention_window_size=8, block_types=["recurrent", "attention"]),
    "jamba": _states("Jamba", **_BATCHED_MM, num_experts=2, num_experts_per_tok=1,
                     attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
                     expert_layer_offset=1, mamba_d_state=6, mamba_dt_rank=5,
                     use_cache=False),
}  # fmt: skip

HUGGING_FACE: dict[str, Entry] = {
    **ENCODERS, **DECODERS, **ENCODER_DECODERS, **VISIONS, **AUDIO, **EXPERTS, **STATE_SPACES
}  # fmt: skip
