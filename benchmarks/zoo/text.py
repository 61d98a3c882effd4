"""Language models of Hugging Face's: encoders, decoders, encoder-decoders."""

from __future__ import annotations

from .making import TEXT, WORDS, Entry, hugging_face, language, translation

__all__ = ["DECODERS", "ENCODERS", "ENCODER_DECODERS"]


def _encoder(stem: str, **sizes: object) -> Entry:
    return hugging_face("encoder", f"{stem}ForMaskedLM", f"{stem}Config", language, **sizes)


def _decoder(stem: str, **sizes: object) -> Entry:
    return hugging_face("decoder", f"{stem}ForCausalLM", f"{stem}Config", language, **sizes)


def _both(stem: str, **sizes: object) -> Entry:
    name = f"{stem}ForConditionalGeneration"
    return hugging_face("encoder-decoder", name, f"{stem}Config", translation, **sizes)


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
