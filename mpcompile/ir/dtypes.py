"""Dtypes: their short names in text, the half dtypes, and which ones are floating."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch

from ..errors import MPCompileError

SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.complex64: "c64", torch.complex128: "c128", torch.int64: "i64", torch.int32: "i32",
    torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2",
}  # fmt: skip


HALF = (torch.float16, torch.bfloat16)


def half_of(tensors: Iterable[object]) -> torch.dtype | None:
    """The half dtype in which parameters among these are stored (the first that is found), or
    None.
    """
    parameters = (p for p in tensors if isinstance(p, torch.nn.Parameter))
    return next((p.dtype for p in parameters if p.dtype in HALF), None)


def is_trained_fp16(value: object) -> bool:
    """Whether it is a parameter whose gradient would be FP16."""
    half = isinstance(value, torch.nn.Parameter) and value.dtype is torch.float16
    return half and value.requires_grad  # type: ignore[attr-defined]


def refuse_fp16(where: str, name: str) -> NoReturn:
    """Raise MPCompileError: the FP16 parameter of this name is trained there."""
    raise MPCompileError(
        f"{where} is already in half precision ({name} is float16), and {name} is trained: small "
        "gradients would become zero. Call model.float() first, for FP32 master weights, or load "
        "it in torch.bfloat16. Frozen FP16 weights (requires_grad=False) are taken"
    )


def is_floating(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
