"""What other tools call otherwise, or keep elsewhere: for the errors that such words get.

`did_you_mean` finds what is spelt wrongly. These are words of torch.amp, Apex, Lightning, Hugging
Face and torch.compile, for which mpcompile has another word, or no need.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import MPCompileError, did_you_mean


def _words(said: str, words: str) -> dict[str, str]:
    return dict.fromkeys(words.split(), said)


# An option that there isn't -> what does it.
_OPTIONS = {
    **_words(
        "the low dtype is dtype='float16', 'bfloat16' or 'auto'",
        "precision mixed_precision amp amp_dtype fp16 bf16 half autocast cast_model_type",
    ),
    **_words("that is level='O0' to 'O3'", "opt_level optimization_level"),
    **_words("level='O0' leaves everything in FP32", "enabled enable"),
    **_words("it runs where the parameters are: model.to(device)", "device device_type"),
    **_words(
        "an optimizer is taken as it is; MPOptimizer(optimizer) compiles its step",
        "optimizer optimizers",
    ),
    **_words(
        "clip as in plain PyTorch, or by MPOptimizer(optimizer, max_grad_norm=...)",
        "max_grad_norm max_norm clip_grad_norm gradient_clip_val",
    ),
    **_words(
        "loss_scale=LossScale.dynamic(...) takes it",
        "init_scale growth_factor backoff_factor growth_interval min_loss_scale max_loss_scale",
    ),
    **_words("loss_scale='dynamic' is on by itself", "grad_scaler scaler use_grad_scaler"),
    **_words(
        "norms compute in FP32 at O1 and O2; policy=Policy(full=[...]) keeps other operators there",
        "keep_batchnorm_fp32 keep_fp32",
    ),
    **_words("parameters stay in FP32: they are the masters", "master_weights keep_master_weights"),
    **_words(
        "policy=Policy(low=[...], full=[...]) names operators",
        "custom_white_list custom_black_list allow_list deny_list",
    ),
    **_words(
        "accumulate as in plain PyTorch, or by train_step(..., accumulate=...)",
        "accumulate accumulate_grad_batches gradient_accumulation gradient_accumulation_steps",
    ),
    **_words(
        "Inductor's go into a dict, options={...}",
        "max_autotune epilogue_fusion shape_padding triton.cudagraphs",
    ),
}

# A dtype that is no low one -> what to do instead.
_DTYPES = {
    **_words("for FP32 without any cast use level='O0'", "float32 fp32 32 32-true float single no"),
    **_words(
        "it is wider than FP32; a model in FP64 runs as it is, without mpcompile()",
        "float64 fp64 64 64-true double",
    ),
    **_words(
        "torch.set_float32_matmul_precision('high') is TF32, for products that stay in FP32", "tf32"
    ),
    **_words(
        "parameters stay in FP32, whatever the low dtype: 'float16' or 'bfloat16'; to store them "
        "in BF16, call model.bfloat16() first",
        "16-true bf16-true",
    ),
    **_words("there are two: 'float16' and 'bfloat16'", "fp8 int8 int4 uint8 float8 nf4"),
}


def unknown_option(name: str, known: Iterable[str]) -> MPCompileError:
    """The error for an option that is none of these."""
    known = tuple(known)
    return MPCompileError(
        f"unknown option {name!r}{hint_for(name, known)}; known: {', '.join(known)}"
    )


def hint_for(name: str, known: Iterable[str]) -> str:
    """What to say of an option that is none of these; nothing if it is like none."""
    return f": {_OPTIONS[name]}" if name in _OPTIONS else did_you_mean(name, known)


def unknown_dtype(dtype: object, known: Iterable[str]) -> MPCompileError:
    """The error for a dtype that is none of these words."""
    word = str(dtype).removeprefix("torch.").lower()
    # also a kind of such a dtype, as "float8_e4m3fn" is of "float8"
    said = next((s for name, s in _DTYPES.items() if f"{word}_".startswith(f"{name}_")), None)
    if said is None:
        said = f"use torch.float16, torch.bfloat16 or 'auto'{did_you_mean(word, known)}"
    return MPCompileError(f"unknown dtype {dtype!r}: {said}")
