"""Calls that can't be replayed as ATen: one opaque node each, with the call that Dynamo wrote."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree

from ..errors import CannotRewrite
from ..ir.dtypes import SHORT
from ..ir.fakes import like
from ..ir.targets import ENTER_AUTOCAST, EXIT_AUTOCAST
from ..torch_inside.names import pytree, torch_functions_off
from .history import current_tracer
from .place import ReplayState


def opaque_call(
    node: fx.Node, place: ReplayState, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record a node with the call of `node` of Dynamo's graph, on these arguments. Its result has
    the shape and dtype that Dynamo noted.

    In an autocast region such a dtype may be low; then a cast to FP32 follows.

    Raises:
        CannotRewrite: parameters are stored low: a body is in the dtypes of the program, and the
            capture in FP32.
    """
    if place.stored is not None:
        name = getattr(node.target, "__name__", str(node.target))
        raise CannotRewrite(f"{name} is called as it is, in {SHORT[place.stored]}")
    tracer = current_tracer()
    autocast = place.autocast()
    for module in pytree.tree_leaves((args, kwargs)):
        if isinstance(module, fx.GraphModule):
            _register(tracer.root, module)
    example = node.meta.get("example_value")  # none: the call returns nothing
    with disable_proxy_modes_tracing(), torch_functions_off():
        result = pytree.tree_map_only(torch.Tensor, _fresh, example)
    proxy_args, proxy_kwargs = pytree.tree_map(tracer.unwrap_proxy, (args, kwargs))
    entered = autocast and _switch(ENTER_AUTOCAST, (*autocast, True, None))
    proxy = tracer.create_proxy(node.op, node.target, proxy_args, proxy_kwargs)
    proxy.node.meta["mp_opaque"] = True
    result = track_tensor_tree(result, proxy, constant=None, tracer=tracer)
    if autocast is None:
        return result
    _switch(EXIT_AUTOCAST, (entered,))
    dtype = autocast[1]
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(torch.float32) if t.dtype is dtype else t, result
    )


def _switch(target: Any, args: tuple[Any, ...]) -> fx.Node:
    """A node that switches autocast around an opaque node; it is not part of the program."""
    node: fx.Node = current_tracer().create_node("call_function", target, args, {})
    node.meta.update(mp_opaque=True, val=None)
    return node


def _fresh(value: torch.Tensor) -> torch.Tensor:
    """A fake of the current mode like one of Dynamo's, tracked by autograd or not."""
    new = like(value)
    if not value.requires_grad:
        return new
    with torch.enable_grad():
        result = new.requires_grad_().clone()  # no leaf: the program may write to it
    return result if result.stride() == new.stride() else new


def _register(root: Any, module: fx.GraphModule) -> None:
    """Register a body on the traced module, so that a node can name it."""
    if any(module is known for known in root.modules()):
        return
    name = next(n for i in itertools.count() if not hasattr(root, n := f"body_{i}"))
    root.register_module(name, module)
