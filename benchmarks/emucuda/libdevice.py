"""NVIDIA's library of device functions, by torch's functions on the host.

What is not here raises, by its name. A rounding other than to nearest is not here either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["fill"]

_SAME_NAME = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan",
    "tanh", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh", "erf", "erfc",
    "erfinv", "lgamma", "floor", "ceil", "trunc", "round", "abs", "pow", "atan2", "fmod", "hypot",
    "copysign", "nextafter", "ldexp",
)  # fmt: skip

_OTHER_NAME: dict[str, Callable[..., Tensor]] = {
    "fabs": torch.abs, "nearbyint": torch.round, "rint": torch.round, "max": torch.maximum,
    "min": torch.minimum, "fast_expf": torch.exp, "fast_dividef": torch.div,
    "add_rn": torch.add, "sub_rn": torch.sub, "mul_rn": torch.mul, "div_rn": torch.div,
    "sqrt_rn": torch.sqrt, "rcp_rn": torch.reciprocal,
}  # fmt: skip

_TO_INTEGERS: dict[str, Callable[..., Tensor]] = {
    "isnan": torch.isnan, "isinf": torch.isinf, "isfinited": torch.isfinite,
    "finitef": torch.isfinite, "signbit": torch.signbit,
    "ilogb": lambda x: torch.frexp(x).exponent - 1,
}  # fmt: skip


def _fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (x.double() * y.double() + z.double()).to(z.dtype)


def fill() -> None:
    """Give each function a body."""
    import triton.language as tl
    from triton.language.extra import libdevice

    names = [n for n in vars(libdevice) if callable(getattr(libdevice, n)) and n[0] != "_"]
    for name in names:
        setattr(libdevice, name, _missing(name))
    same = {name: getattr(torch, name) for name in _SAME_NAME}
    for name, function in {**same, **_OTHER_NAME, "fma": _fma, "fma_rn": _fma}.items():
        setattr(libdevice, name, _lifted(function))
    for name, function in _TO_INTEGERS.items():
        setattr(libdevice, name, _lifted(function, tl.int32))
    libdevice.llrint = _lifted(torch.round, tl.int64)


def _missing(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"the emulated GPU has no libdevice.{name}")

    return call


def _lifted(function: Callable[..., Tensor], result: Any = None) -> Callable[..., Any]:
    """A function of Triton's tensors, whose results have the first one's dtype or the given one."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        to_tensor = interpreter.interpreter_semantic.to_tensor
        tensors = [x if isinstance(x, tl.tensor) else to_tensor(x) for x in args]
        arrays = np.broadcast_arrays(*(t.handle.data for t in tensors))
        found = function(*(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays)).numpy()
        kind = result or tensors[0].dtype.scalar
        found = found.astype(interpreter._get_np_dtype(kind), copy=False)
        shaped = next((t.type for t in tensors if isinstance(t.type, tl.block_type)), None)
        shape = kind if shaped is None else tl.block_type(kind, shaped.shape)
        return tl.tensor(interpreter.TensorHandle(found, kind), shape)

    return call
