"""Whether this device has a kernel for an operator in a dtype: asked of torch, not of a list.

`meta` and fake tensors accept calls that the device refuses ("not implemented for 'Half'"), and the
set of refusals changes with every torch release. So the operator is run once, forward and
backward, on tiny random tensors of the low dtype: the node's own arguments, every size capped at 8.
An error alone doesn't say what is refused, the dtype or the shrunken shapes. So the operator runs
in FP32 as well: if that works, it was the dtype. If it doesn't, it is tried without gradients
(batch norm writes to its statistics), and at larger sizes. What can't be tried at any stays in
FP32. A recurrent kernel raises no error: oneDNN reads past the end of weights that don't fit
together. So it runs in a real layer. Nor does torch say that it leaves cuDNN: in a dtype that cuDNN
is not asked to run such a layer in, it goes step by step, in many kernels for each. So that is
asked by itself.

Only torch's own operators are run. A custom operator is never run behind its author's back: the
author who registers it as low promises the kernels.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from ..devices.registry import unchanged
from ..torch_inside.names import OpOverload, autocast_off, pytree
from .lookup import castable, rule_for

_CAP = 8
# What is tried one after the other: sizes capped at this, or None: as they are; with gradients?
_TRIES = ((_CAP, True), (_CAP, False), (64, True), (64, False), (None, True))
_MOST_ELEMENTS = 2**24  # of a tensor as it is: of a larger one, a part of its first dim
_answers: dict[Any, bool] = {}


def has_kernel(node: fx.Node, low: torch.dtype, device: torch.device) -> bool:
    """Whether the node's operator runs in `low` on `device`, forward and backward. Cached."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return True
    key = (target, low, device.type, _signature(node))
    if key not in _answers:
        _answers[key] = _runs(node, low, device)
    return _answers[key]


def _signature(node: fx.Node) -> str:
    """The facts that may decide which kernel is picked: ranks, dtypes, flags, modes; no sizes."""

    def part(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            value = argument.meta["mp_captured"]
            is_tensor = isinstance(value, torch.Tensor)
            return f"{value.ndim}d {value.dtype}" if is_tensor else type(value).__name__
        is_number = isinstance(argument, (int, float)) and not isinstance(argument, bool)
        return type(argument).__name__ if is_number else argument

    return str(map_aggregate((node.args, node.kwargs), part))


def _runs(node: fx.Node, low: torch.dtype, device: torch.device) -> bool:
    for cap, tracked in _TRIES:
        if _is_accepted(node, low, device, cap, tracked):
            return True
        if _is_accepted(node, torch.float32, device, cap, tracked):
            return False
    return False


def _is_accepted(
    node: fx.Node, dtype: torch.dtype, device: torch.device, cap: int | None, tracked: bool
) -> bool:
    """Whether the operator runs on samples of this dtype; forward and backward if `tracked`."""
    target: Any = node.target

    def sample(argument: Any, position: int) -> Any:
        used = dtype if castable(target, position) else torch.float32
        samples = map_aggregate(argument, lambda x: _sample(x, used, device, cap))
        return map_aggregate(samples, lambda x: _as_leaf(x) if tracked else x)

    try:
        with _aside(device):
            if (recurrent := rule_for(target).recurrent) is not None:
                if _leaves_cudnn(device, dtype):
                    return False
                made = recurrent.module(_CAP, _CAP).to(device, dtype)
                results = [made(torch.rand(1, 1, _CAP, device=device, dtype=dtype))[0]]
            else:
                args = [sample(a, i) for i, a in enumerate(node.args)]
                kwargs = {name: sample(a, -1) for name, a in node.kwargs.items()}
                results = pytree.tree_leaves(target(*args, **kwargs))
            ends = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(r) for r in ends])
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return True


def _leaves_cudnn(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether cuDNN runs a recurrent layer in FP32 on this device, and not in `dtype`."""
    full, low = (torch.empty(1, device=device, dtype=d) for d in (torch.float32, dtype))
    return torch.cudnn_is_acceptable(full) and not torch.cudnn_is_acceptable(low)


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """Restore random states, hide warnings, and ignore the modes (grad, autocast) around us."""
    with (
        warnings.catch_warnings(),
        unchanged([device]),
        torch.inference_mode(False),
        torch.enable_grad(),
        autocast_off(),
    ):
        warnings.simplefilter("ignore")
        yield


def _sample(argument: Any, dtype: torch.dtype, device: torch.device, cap: int | None) -> Any:
    """A small tensor of an operand's rank, in `dtype` if the operand is FP32; sizes of 1 stay 1."""
    if isinstance(argument, fx.Node):
        argument = argument.meta["mp_captured"]
    if isinstance(argument, torch.SymInt):
        return 2
    if not isinstance(argument, torch.Tensor):
        return argument
    sizes: list[int | torch.SymInt] = list(argument.shape)
    shape = [min(s, cap or s) if isinstance(s, int) else 2 for s in sizes]
    if math.prod(shape) > _MOST_ELEMENTS:
        shape[0] = max(1, _MOST_ELEMENTS // math.prod(shape[1:]))
    if argument.dtype is torch.float32:
        return torch.rand(shape, device=device, dtype=dtype)
    return torch.zeros(shape, device=device, dtype=argument.dtype)


def _as_leaf(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.requires_grad_() if is_float else value
