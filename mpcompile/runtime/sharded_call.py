"""Calls of the modules of a model that FSDP2 shards.

FSDP gathers a module's parameters in a hook before its forward, which runs outside of any graph.
So no graph reaches across a sharded module: each is compiled by itself, between its hooks. A module
around sharded ones ends its graph at each of them, and Dynamo leaves such a frame uncompiled if it
is one of torch's own (`nn.Sequential`) or calls them in a loop. Then the modules beside them are
compiled one by one:

    fully_shard:          [root: embed, [block], [block], head]
    compiled, each alone:        embed   block    block   head
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from ..ranks import fsdp
from ..torch_inside.modules import plain_call
from ..torch_inside.replace import Spot, put

Function = Callable[..., Any]


def between_hooks(module: nn.Module, forward: Function) -> Function:
    """A call of a sharded module: its hooks run as they are, around this forward.

    While it lasts, `module.forward` is another function. It goes back to what it was: a module that
    someone pickles, copies or asks for its forward is as it was.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        undo = put(Spot(vars(module), "forward"), forward)
        try:
            return plain_call(module)(*args, **kwargs)
        finally:
            undo()

    return ends_graph(call)


def ends_graph(call: Function) -> Function:
    """Make Dynamo end a graph before this call. What was compiled inside of it stays compiled."""
    disabled: Function = torch.compiler.disable(call)
    return disabled


def own_forward(module: nn.Module) -> Function:
    """The module's forward, without its hooks: called with the module and the arguments."""
    patched = vars(module).get("forward")
    if patched is None:
        plain: Function = type(module).forward
        return plain
    return lambda _, *args, **kwargs: patched(*args, **kwargs)


def parts_of(model: nn.Module, regions: Collection[nn.Module] = ()) -> list[nn.Module]:
    """The modules inside of a model that are to be compiled by themselves, because FSDP shards them
    or modules beside them, or because they stand beside `regions`, whose calls end graphs, too.
    """
    ends = {m for m in model.modules() if fsdp.is_sharded(m) or m in regions}
    found = dict.fromkeys(_called_in(model, ends)) if ends - {model} else {}
    return [part for part in found if part not in regions]


def _called_in(module: nn.Module, ends: Collection[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        called = type(child).forward is not nn.Module.forward  # a ModuleList is not
        if called:
            yield child
        if not called or any(m is not child and m in ends for m in child.modules()):
            yield from _called_in(child, ends)
