"""Let Inductor generate kernels for the device, and run them in Triton's interpreter.

    let_inductor_in(device)              # needs Triton; for the rest of the process

Everything up to the kernels' source is as on a GPU. A kernel is run where it would be launched:
its programs one after the other, over the device's memory, which is the host's. Times can't be
measured, so of several block sizes the first is taken; and blocks are made larger (`larger`).

Torch internals used here were read in torch 2.13, Triton's in 3.7.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.cuda_parts.inductor import describe, set_for_all_threads, triton_driver
from benchmarks.emucuda.device import EmulatedGPU


def has_triton() -> bool:
    """Whether Inductor's kernels can be run."""
    return importlib.util.find_spec("triton") is not None


def let_inductor_in(device: EmulatedGPU) -> None:
    """From now on Inductor's kernels for the device are run.

    Raises:
        ImportError: Triton is not installed.
    """
    import triton
    from torch._inductor import config
    from torch._inductor.codegen import triton_combo_kernel
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.runtime.hints import TRITON_MAX_BLOCK

    describe(device.gpu)
    triton.runtime.driver.set_active(triton_driver(device.gpu))
    guards: Any = torch._C._dynamo.guards  # type: ignore[attr-defined]
    guards._empty_strided_cuda = functools.partial(_empty_strided, "cuda")
    # What is compiled here is of no use to other processes.
    set_for_all_threads(config, "fx_graph_cache", False)
    set_for_all_threads(torch._functorch.config, "enable_autograd_cache", False)
    # A block of one row has no first dimension, unless it is to be made larger.
    TritonKernel.want_no_x_dim = lambda self: False  # type: ignore[method-assign]
    # A kernel over many tensors, as an optimizer's step, has the size of its blocks in its text.
    triton_combo_kernel.DEFAULT_COMBO_BLOCK_SIZE_1D = IN_TEXT
    TRITON_MAX_BLOCK["X"] = max(TRITON_MAX_BLOCK["X"], IN_TEXT)  # a mask is left out above that
    _run_kernels(device)


def _empty_strided(
    device: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _run_kernels(device: EmulatedGPU) -> None:
    """In place of compiling, timing and launching."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner, GridExpr, config_to_dict

    from benchmarks.emucuda import interpreter

    interpreter.mend()
    one_at_a_time = threading.RLock()  # the interpreter's grid is the process's

    def run(tuner: CachingAutotuner, *args: Any, **kwargs: Any) -> None:
        config = tuner.configs[0]
        names = [name for name in tuner.triton_meta["signature"] if name not in config.kwargs]
        values = dict(zip(names, args, strict=False))
        blocks = larger(tuner, dict(config.kwargs), values)
        sizes = config_to_dict(config) | blocks
        grid = GridExpr.from_meta(tuner.inductor_meta, sizes).eval_slow(values)
        device.launched.append(tuner.fn.__name__)
        with one_at_a_time:
            _execute(tuner.fn, values, blocks, grid)

    CachingAutotuner.precompile = lambda self, *args, **kwargs: None  # type: ignore[method-assign]
    CachingAutotuner.run = run  # type: ignore[method-assign]


def _execute(
    kernel: Any, values: Mapping[str, Any], blocks: Mapping[str, int], grid: Sequence[int]
) -> None:
    """All programs of one launch."""
    from triton.runtime import interpreter as triton_interpreter

    from benchmarks.emucuda.interpreter import bounds

    constants = _constants(kernel)
    tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
    bound: dict[str, Any] = dict(blocks)
    for name, value in values.items():
        given = torch.ops.emucuda.to_host(value) if isinstance(value, torch.Tensor) else value
        bound[name] = given if name in constants else triton_interpreter._implicit_cvt(given)
    body = kernel.rewrite()
    builder = triton_interpreter.interpreter_builder
    builder.set_grid_dim(*grid)
    bounds.set(kernel.__name__, tensors)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, of values that a mask leaves out
        for index in np.ndindex(*grid):
            builder.set_grid_idx(*index)
            body(**bound)


@functools.cache
def _constants(kernel: Any) -> frozenset[str]:
    from triton.runtime.jit import _normalize_ty

    annotations = kernel.fn.__annotations__.items()
    return frozenset(name for name, kind in annotations if _normalize_ty(kind) == "constexpr")


# -- blocks ----------------------------------------------------------------------------------------
# Larger blocks than Inductor chose: numpy's calls cost more than its elements.
#
# A GPU wants thousands of programs of a thousand elements. The interpreter runs one after the
# other, so a kernel should be few programs of many elements. What a program computes does not
# depend on its size, but for sums over several steps of a loop. Two things must hold: where
# Inductor left a mask out, since its own blocks divide the size, so must ours; and kernels whose
# programs share out a reduction keep their blocks.

MOST = 2**17
"""Elements that one program works on. More is no faster, and takes memory for each operator."""

IN_TEXT = 2**14
"""The same for a kernel over many tensors, most of which are small: it has one size for all."""

_GRIDS = ("Grid1D", "Grid2D", "Grid3D", "Grid2DWithYZOverflow")


def larger(tuner: Any, blocks: dict[str, int], values: Mapping[str, Any]) -> dict[str, int]:
    """Block sizes of a kernel with such arguments.

    Args:
        tuner: Inductor's `CachingAutotuner`.
        blocks: Inductor's choice, as `{"XBLOCK": 128}`.
        values: the arguments by their names, with the sizes `xnumel` and so on.
    """
    grid = tuner.inductor_meta.get("grid_type", "")
    source = source_of(tuner.fn)
    if "ComboKernel" in grid:
        return _of_several(blocks, source)
    if tuner.is_mix_order_reduction or "RSPLIT" in blocks or grid not in _GRIDS:
        return blocks
    found = dict(blocks)
    room = MOST
    for axis, hint in (tuner.size_hints or {}).items():
        if axis.startswith("r"):
            room //= max(1, found.get(f"{axis.upper()}BLOCK", _power_above(hint)))
    if "R0_BLOCK" in found and "r0_numel" in values:
        whole = _whole("r0_", values["r0_numel"], MOST, source)
        room = max(1, room * found["R0_BLOCK"] // whole)
        found["R0_BLOCK"] = whole
    for axis in "xyz":
        name = f"{axis.upper()}BLOCK"
        if name in found:
            found[name] = _whole(axis, values[f"{axis}numel"], max(room, 1), source)
            room //= found[name]
    return found


def _of_several(blocks: dict[str, int], source: str) -> dict[str, int]:
    """Of a kernel that does several kernels' work, one size for all."""
    sizes = [int(n) for n in re.findall(r"xnumel = (\d+)", source)]
    masked = "xmask = tl.full" not in source and "program_id(1)" not in source
    if set(blocks) != {"XBLOCK"} or not sizes or not masked:
        return blocks
    return {"XBLOCK": max(blocks["XBLOCK"], min(_power_above(max(sizes)), MOST))}


def _whole(axis: str, size: int, most: int, source: str) -> int:
    """A block that holds the whole axis, or as much as there is room for."""
    size = max(1, int(size))
    masked = f"{axis}mask" in source and f"{axis}mask = tl.full" not in source
    found = _power_above(size) if masked else size & -size  # the largest power that divides it
    return max(1, min(found, most))


def _power_above(size: int) -> int:
    return 1 << (int(size) - 1).bit_length()


@functools.cache
def source_of(kernel: Any) -> str:
    """The text of a kernel."""
    return inspect.getsource(kernel.fn)
