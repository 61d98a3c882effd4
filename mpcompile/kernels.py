"""Does this device have a kernel for this operator in this dtype? Asked of torch, not of a list.

`meta` and fake tensors accept what the device then refuses ("not implemented for 'Half'"), and the
set of refusals changes with every torch release. So the operator is run once, forward and backward,
on tiny random tensors of the low dtype: the node's own arguments with every size capped at 8. Only a
refusal counts; a complaint about the shrunken shapes is not one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from . import ops

_CAP = 8
_REFUSALS = ("not implemented for", "not support", "unsupported dtype", "expected scalar type")
_answers: dict[Any, bool] = {}


def has_kernel(node: fx.Node, low: torch.dtype, device: torch.device) -> bool:
    """Whether the node's operator runs in `low` on `device`, forward and backward. Cached."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    ranks = tuple(
        value.ndim
        for n in node.all_input_nodes
        if isinstance(value := n.meta["mp_captured"], torch.Tensor)
    )
    key = (node.target, low, device.type, ranks)
    if key not in _answers:
        _answers[key] = _runs(node, low, device)
    return _answers[key]


def _runs(node: fx.Node, low: torch.dtype, device: torch.device) -> bool:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)

    def sample(argument: Any, lowered: bool) -> Any:
        return map_aggregate(argument, lambda x: _sample(x, low if lowered else None, device))

    cpu_state = torch.get_rng_state()  # a dropout probe must not move the user's random numbers
    try:
        with torch.random.fork_rng(enabled=device.type == "cuda"), torch.enable_grad():
            args = [sample(a, ops.castable(target, i)) for i, a in enumerate(node.args)]
            kwargs = {name: sample(a, True) for name, a in node.kwargs.items()}
            results = pytree.tree_leaves(target(*args, **kwargs))
            tracked = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
            if tracked:
                torch.autograd.backward([r.float().sum() for r in tracked])
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return not any(word in str(error) for word in _REFUSALS)
    finally:
        torch.set_rng_state(cpu_state)
    return True


def _sample(argument: Any, low: torch.dtype | None, device: torch.device) -> Any:
    """A tiny tensor of an operand's rank: equal sizes stay equal, ones stay ones. FP32 operands
    come in `low`, if it is given."""
    if isinstance(argument, fx.Node):
        argument = argument.meta["mp_captured"]
    if isinstance(argument, torch.SymInt):
        return 2
    if not isinstance(argument, torch.Tensor):
        return argument
    sizes: list[int | torch.SymInt] = list(argument.shape)
    shape = [min(s, _CAP) if isinstance(s, int) else 2 for s in sizes]
    if argument.dtype is torch.float32:
        made = torch.rand(shape, device=device, dtype=low or torch.float32)
        return made.requires_grad_()
    return torch.zeros(shape, device=device, dtype=argument.dtype)
