"""Triton's interpreter, mended where it computes otherwise than a GPU does, or not at all.

| what | as it comes | here |
|---|---|---|
| casts from and to BF16 | cut off, without infinities | rounded to nearest even |
| arithmetic in BF16 | on its bits as integers | in FP32, rounded |
| a sum | one after the other, in its dtype | as exact as a tree of FP32 sums: in FP64, rounded |
| reductions and scans by a function | element by element in Python | by halves; rows at a time |
| fma | two roundings | one |
| machine code in a kernel | refused | what Inductor writes for `atan`: fma, 1/x |
| libdevice | nothing | torch's functions on the host (`libdevice.py`) |
| an address outside of the arguments | reads what is there | raises (`bounds.py`) |

Triton internals used here were read in Triton 3.7.
"""

from __future__ import annotations

import types
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from . import libdevice
from .bounds import Bounds, watch

__all__ = ["bounds", "mend"]

bounds = Bounds()
"""Of the kernel that runs."""


def mend() -> None:
    """For the rest of the process."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    # The interpreter changes Triton's language around each kernel and back: once is enough.
    interpreter._patch_lang(_module_that_uses(tl))
    interpreter._patch_lang = lambda kernel: SimpleNamespace(restore=lambda: None)
    builder = interpreter.InterpreterBuilder
    _mend_bf16(builder)
    builder.create_fma = _fma
    builder.create_erf = _erf
    builder.create_inline_asm = _machine_code
    interpreter.ReduceOps.sum = _sum
    interpreter.ReduceOps.generic_reduce = _reduce_by_halves
    interpreter.ScanOps.generic_scan = _scan_by_rows
    libdevice.fill()
    watch(bounds)


def _module_that_uses(tl: types.ModuleType) -> Any:
    """What the interpreter looks at to see which modules a kernel uses."""

    def kernel() -> None:
        pass

    return types.FunctionType(kernel.__code__, {"tl": tl, "core": tl.core})


def _mend_bf16(builder: Any) -> None:
    import triton.language as tl

    cast, binary = builder.cast_impl, builder.binary_op

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        given, wanted = source.dtype.scalar, kind.scalar
        if given == wanted or tl.bfloat16 not in (given, wanted):
            return cast(self, source, kind)
        return _handle(_converted(source.data, given, wanted), wanted)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        kinds = left.dtype.scalar, right.dtype.scalar
        if tl.bfloat16 not in kinds or isinstance(left.dtype, tl.pointer_type):
            return binary(self, left, right, op)
        a, b = (_converted(x.data, tl.bfloat16, tl.float32) for x in (left, right))
        found = op(a, b)
        if found.dtype != bool:
            found = _converted(found, tl.float32, tl.bfloat16)
        return _handle(found, kinds[0])

    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = lambda self, source, kind, rounding: cast_impl(self, source, kind)
    builder.binary_op = binary_op


def _handle(data: Any, kind: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(data, kind)


def _converted(data: Any, given: Any, wanted: Any) -> Any:
    """Numpy has no BF16: the interpreter keeps its bits, as uint16."""
    import triton.language as tl
    from triton.runtime.interpreter import _get_np_dtype

    values = torch.from_numpy(np.ascontiguousarray(data))
    if given == tl.bfloat16:
        values = values.view(torch.bfloat16)
    if wanted == tl.bfloat16:
        return values.to(torch.bfloat16).view(torch.uint16).numpy()
    return values.to(getattr(torch, str(np.dtype(_get_np_dtype(wanted))))).numpy()


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    return _handle(_fused(x.data, y.data, z.data), z.dtype.scalar)


def _fused(x: Any, y: Any, z: Any) -> Any:
    """`x * y + z`, rounded once if it is FP32: the product of two is exact in FP64."""
    if z.dtype != np.float32:
        return x * y + z
    return (x.astype(np.float64) * y + z).astype(np.float32)


INSTRUCTIONS = {
    "fma.rn.f32 $0, $1, $2, $3;": _fused,
    "rcp.approx.ftz.f32 $0, $1;": np.reciprocal,  # a GPU's is off by one rounding at most
}


def _machine_code(
    self: Any, code: str, constraints: str, values: Any, kinds: Any, pure: bool, pack: int
) -> Any:
    if code not in INSTRUCTIONS:
        raise NotImplementedError(f"the emulated GPU can't run the machine code {code!r}")
    result = _handle(INSTRUCTIONS[code](*(v.data for v in values)), kinds[0].scalar)
    return SimpleNamespace(get_result=lambda index: result)


def _erf(self: Any, x: Any) -> Any:
    return _handle(torch.erf(torch.from_numpy(x.data)).numpy(), x.dtype.scalar)


def _sum(self: Any, given: Any) -> Any:
    data = given.handle.data
    wide = np.float64 if data.dtype in (np.float32, np.float16) else None
    total = np.sum(data, axis=self.axis, keepdims=self.keep_dims, dtype=wide)
    return self.to_tensor(total, given.dtype)


def _combined(self: Any, *operands: Any) -> tuple[Any, ...]:
    found = self.combine_fn.fn(*operands)
    return found if isinstance(found, tuple) else (found,)


def _reduce_by_halves(self: Any, given: Any) -> list[Any]:
    """Every other element with its neighbour, until one is left: blocks are powers of two."""
    whole = self.axis is None
    tensors, axis = self.unravel(given, self.axis)
    now = tuple(tensors)
    while (n := now[0].handle.data.shape[axis]) > 1:
        halves = [
            [self.to_tensor(t.handle.data.take(range(start, n, 2), axis), t.dtype) for t in now]
            for start in (0, 1)
        ]
        now = _combined(self, *halves[0], *halves[1])
    found = []
    for result, like in zip(now, tensors, strict=True):
        data = result.handle.data
        if not self.keep_dims:
            data = data.squeeze(axis)
        found.append(
            self.to_tensor(data.item() if whole and not self.keep_dims else data, like.dtype)
        )
    return found


def _scan_by_rows(self: Any, given: Any) -> list[Any]:
    data, axis = [t.handle.data for t in given], self.axis

    def row(i: int) -> list[Any]:
        return [
            self.to_tensor(d.take([i], axis), t.dtype) for d, t in zip(data, given, strict=True)
        ]

    now = tuple(row(0))
    rows = [now]
    for i in range(1, data[0].shape[axis]):
        now = _combined(self, *now, *row(i))
        rows.append(now)
    columns = zip(*rows, strict=True)
    return [
        self.to_tensor(np.concatenate([t.handle.data for t in column], axis), like.dtype)
        for column, like in zip(columns, given, strict=True)
    ]
