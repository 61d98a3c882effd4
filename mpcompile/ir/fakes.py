"""FakeTensors of a graph's inputs, as AOTAutograd makes them (same mode, same symbols for sizes),
new tensors with the layout of a given one, and operators run on fakes unseen by the caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..torch_inside.names import (
    FakeTensor,
    FakeTensorMode,
    TracingContext,
    suggest_memory_format,
    top_saved_hooks,
)


def fake_twin(value: Any, context: TracingContext | None = None) -> Any:
    """The fake twin of an input. A value that is no tensor, or already a fake of this mode, is
    returned as it is: a program may run on FakeTensors, for example for a device that isn't there.

    One that Dynamo doesn't know has fixed sizes. Without a fake, AOTAutograd would make symbolic
    ones for the real tensor, and no guard would check those.
    """
    context = context or TracingContext.get()
    mode = context.fake_mode
    assert mode is not None
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, FakeTensor) and value.fake_mode is mode:
        return value
    symbolic = context.tensor_to_context.get(value)
    if symbolic is None:
        return mode.from_tensor(value, static_shapes=True)
    return mode.from_tensor(
        value, symbolic_context=symbolic, source=symbolic.tensor_source, trace=False
    )


def like(
    value: torch.Tensor, *, dtype: torch.dtype | None = None, strides: Sequence[Any] | None = None
) -> torch.Tensor:
    """A new, uninitialised tensor with the shape, strides, dtype and device of a strided one, or
    with another dtype or other strides; fake under a fake mode. (`torch.empty_like` changes the
    strides of a tensor with gaps.)
    """
    return torch.empty_strided(
        value.shape,
        value.stride() if strides is None else strides,
        dtype=value.dtype if dtype is None else dtype,
        device=value.device,
    )


def duplicate(value: torch.Tensor) -> torch.Tensor:
    """A clone with the strides of the value. (`clone` closes the gaps of a slice, and a graph that
    was compiled for the slice fails on that.)
    """
    cloned = value.clone()
    if value.layout is not torch.strided or cloned.stride() == value.stride() or not value.numel():
        return cloned
    pairs = zip(value.shape, value.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    memory = value.as_strided((extent,), (1,)).clone()
    return memory.as_strided(value.shape, value.stride())


def memory_for(
    master: torch.Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None
) -> torch.Tensor:
    """Memory for a copy of `master` in `dtype`, padded with zeros where `shape` is larger."""
    if shape is None or tuple(shape) == tuple(master.shape):
        return torch.empty_like(master, dtype=dtype, requires_grad=False)
    stored = torch.zeros(tuple(shape), dtype=dtype, device=master.device)
    return stored.contiguous(memory_format=suggest_memory_format(master))


@contextlib.contextmanager
def unseen(mode: FakeTensorMode) -> Iterator[None]:
    """Hide the operators that passes run on fakes, and that `rules/kernels.py` runs on samples.

    From the caller's hooks on saved tensors: such a hook may count tensors, as a checkpoint's does.
    From AOTAutograd: it would ask where the symbols have gone that stand for sizes which depend on
    values (`x[mask]`), and makes its own.

    Args:
        mode: of the fakes.
    """
    with contextlib.ExitStack() as hidden:
        if top_saved_hooks(True) is not None:
            same = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
            hidden.enter_context(same)
        if mode.shape_env is not None:
            hidden.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        yield
