"""Half inputs of an FP32 model are widened to FP32 at its entry, which is exact.

Otherwise they would fail before a backend sees them. The first LOW operator narrows them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..ir.dtypes import HALF
from ..torch_inside import pytree

__all__ = ["widened", "widens_inputs"]


def widens_inputs(module: nn.Module) -> bool:
    """Whether half inputs of the module are to be widened: only if it has no half parameters."""
    return not any(p.dtype in HALF for p in module.parameters())


def widened(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with its half tensors, at any depth, in FP32."""
    if not _has_half(args, kwargs):
        return args, kwargs
    wide: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
        lambda x: x.float() if _is_half(x) else x, (args, kwargs)
    )
    return wide


def _has_half(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there is a half tensor among the arguments, at any depth.

    Most calls take only tensors: for these, flattening the tree of arguments would be a noticeable
    part of a small model's call.
    """
    return any(
        _is_half(x) if isinstance(x, torch.Tensor) else any(map(_is_half, pytree.tree_leaves(x)))
        for x in (*args, *kwargs.values())
    )


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in HALF
