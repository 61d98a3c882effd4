"""Triton's interpreter, mended where it computes otherwise than a GPU does, or not at all.

| what | as it comes | here |
|---|---|---|
| casts from and to BF16 | cut off, without infinities | rounded to nearest even |
| arithmetic in BF16 | on its bits as integers | in FP32, rounded |
| a sum | one after the other, in its dtype | as exact as a tree of FP32 sums: in FP64, rounded |
| reductions and scans by a function | element by element in Python | by halves; rows at a time |
| fma | two roundings | one |
| machine code in a kernel | refused | what Inductor writes for `atan`: fma, 1/x |
| libdevice | nothing | torch's functions on the host (below) |
| an address outside of the arguments | reads what is there | raises |

Triton internals used here were read in Triton 3.7.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

# -- bounds ----------------------------------------------------------------------------------------
# A kernel reads and writes nothing but the memory of its arguments.
#
# On a GPU an address beyond it is an illegal access or, worse, another tensor's memory.


class Bounds:
    """The memory of the arguments of the kernel that runs."""

    def __init__(self) -> None:
        self.set("none", ())

    def set(self, kernel: str, tensors: Iterable[torch.Tensor]) -> None:
        storages = [t.untyped_storage() for t in tensors]
        spans = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages}) or [(0, 0)]
        self.kernel = kernel
        self.starts, self.ends = (np.array(side, dtype=np.uint64) for side in zip(*spans))  # noqa: B905

    def check(self, what: str, addresses: Any, mask: Any, size: int) -> None:
        """Raise where an element of `size` bytes lies outside."""
        used = addresses[np.broadcast_to(mask, addresses.shape)].ravel()
        span = np.searchsorted(self.starts, used, side="right") - 1
        outside = (span < 0) | (used + np.uint64(size) > self.ends[span])
        if outside.any():
            raise RuntimeError(
                f"illegal memory access (emulated): {what} in {self.kernel}, {outside.sum()} of "
                f"{used.size} elements"
            )


def watch(bounds: Bounds) -> None:
    """Check each load, store and atomic operation of the interpreter's."""
    import triton.runtime.interpreter as interpreter

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    update, exchange = builder.create_atomic_rmw, builder.create_atomic_cas

    def size_of(pointers: Any) -> int:
        found: int = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
        return found

    def written(what: str, pointers: Any, value: Any, mask: Any) -> None:
        size = size_of(pointers)
        bounds.check(what, pointers.data, mask, size)
        if value.data.dtype.itemsize != size:
            raise RuntimeError(f"{what} of {value.data.dtype} to {pointers.get_element_ty()}")

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        bounds.check("load", pointers.data, mask.data, size_of(pointers))
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        written("store", pointers, value, mask.data)
        return store(self, pointers, value, mask, *rest)

    def checked_update(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        written("atomic update", pointers, value, mask.data)
        return update(self, op, pointers, value, mask, *rest)

    def checked_exchange(self: Any, pointers: Any, old: Any, new: Any, *rest: Any) -> Any:
        written("atomic exchange", pointers, new, True)
        return exchange(self, pointers, old, new, *rest)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_rmw, builder.create_atomic_cas = checked_update, checked_exchange


# -- libdevice -------------------------------------------------------------------------------------
# NVIDIA's library of device functions, by torch's functions on the host.
#
# What is not here raises, by its name. A rounding other than to nearest is not here either.

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


def _fma_of_tensors(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (x.double() * y.double() + z.double()).to(z.dtype)


def fill_libdevice() -> None:
    """Give each function a body."""
    import triton.language as tl
    from triton.language.extra import libdevice

    names = [n for n in vars(libdevice) if callable(getattr(libdevice, n)) and n[0] != "_"]
    for name in names:
        setattr(libdevice, name, _missing(name))
    same = {name: getattr(torch, name) for name in _SAME_NAME}
    for name, function in {
        **same,
        **_OTHER_NAME,
        "fma": _fma_of_tensors,
        "fma_rn": _fma_of_tensors,
    }.items():
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


# -- interpreter -----------------------------------------------------------------------------------

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
    fill_libdevice()
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
