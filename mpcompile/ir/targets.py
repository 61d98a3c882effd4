"""Call targets of torch, other than ATen operators, that several rooms look for in a graph."""

from __future__ import annotations

import torch
from torch import fx

from ..torch_inside.names import enter_autocast, exit_autocast, set_grad_enabled

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
INVOKE_SUBGRAPH = torch.ops.higher_order.invoke_subgraph

ENTER_AUTOCAST = enter_autocast
EXIT_AUTOCAST = exit_autocast
AUTOCAST = (ENTER_AUTOCAST, EXIT_AUTOCAST)

SET_GRAD_ENABLED = set_grad_enabled


def nesting(node: fx.Node) -> int:
    """1 for a node that enters a level of a functorch transform, -1 for one that leaves it."""
    name = getattr(node.target, "__name__", "")
    return name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")


def differentiates(node: fx.Node) -> list[fx.Node] | None:
    """What a node of Dynamo's graph differentiates by, if it is a call of autograd's `grad`."""
    is_functorchs = getattr(node.target, "__name__", "") == "_autograd_grad"
    if node.target is not torch.autograd.grad and not is_functorchs:
        return None
    inputs: list[fx.Node] = []
    fx.node.map_arg(node.args[1] if len(node.args) > 1 else node.kwargs["inputs"], inputs.append)
    return inputs
