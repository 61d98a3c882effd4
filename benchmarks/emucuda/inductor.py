"""Let Inductor generate kernels for the device, and run them in Triton's interpreter.

    let_inductor_in(device)              # needs Triton; for the rest of the process

Everything up to the kernels' source is as on a GPU. A kernel is run where it would be launched:
its programs one after the other, over the device's memory, which is the host's. Times can't be
measured, so of several block sizes the first is taken; and blocks are made larger (`blocks.py`).

Torch internals used here were read in torch 2.13, Triton's in 3.7.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.cuda_parts.inductor import describe, set_for_all_threads, triton_driver

from .blocks import IN_TEXT, larger
from .device import EmulatedGPU

__all__ = ["has_triton", "let_inductor_in"]


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
    from torch._inductor.runtime.triton_heuristics import (
        CachingAutotuner,
        GridExpr,
        config_to_dict,
    )

    from . import interpreter

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

    from .interpreter import bounds

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
