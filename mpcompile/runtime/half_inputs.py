"""Half inputs of an FP32 model are widened to FP32 at its entry, which is exact.

Otherwise they would fail before a backend sees them. The first LOW operator narrows them again.

What the program then reads are copies. A program that writes to such an input would write to the
copy alone, and a cast in it (`h = x.float()`) would be the input itself: such a call is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import MPCompileError
from ..ir.dtypes import HALF
from ..torch_inside.names import pytree
from ..torch_inside.tensors import version

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def widens_inputs(module: nn.Module) -> bool:
    """Whether half inputs of the module are to be widened: only if it has no half parameters."""
    return not any(p.dtype in HALF for p in module.parameters())


def widened(
    args: tuple[Any, ...], kwargs: dict[str, Any], made: list[torch.Tensor] | None = None
) -> Arguments:
    """The arguments of a call, with its half tensors, at any depth, in FP32.

    Args:
        made: takes the FP32 tensors, for `refuse_written`.
    """
    if not _has_half(args, kwargs):
        return args, kwargs

    def wide(value: Any) -> Any:
        if not _is_half(value):
            return value
        with torch.inference_mode(False):  # what is made in that mode counts no writes
            new = value.float()
        if made is not None:
            made.append(new)
        return new

    found: Arguments = pytree.tree_map(wide, (args, kwargs))
    return found


def refuse_written(made: Sequence[torch.Tensor]) -> None:
    """Refuse a call that has written to an input that was widened.

    Raises:
        MPCompileError: it has.
    """
    if any(version(tensor) for tensor in made):
        raise MPCompileError(
            "the model writes to an input in half precision, of which it was handed a copy in "
            "FP32: the result may be wrong, and the input is as it was. Hand it FP32, or write to "
            "a clone in forward"
        )


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
