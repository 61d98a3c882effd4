"""The interpreter that runs Dynamo's graph again under the tracer.

The interpreter handles itself what a replay would lose:

* A higher-order operator (autograd.Function, cond, flex_attention) stays one opaque node. Traced
  through, `autograd.Function` would silently lose its backward.
* So does a function that calls such an operator unseen by Dynamo (`torch.compiler.allow_in_graph`).
* Derivatives inside of the program (`torch.autograd.grad`, `torch.func`, `torch.vmap`) are written
  out as operators (`derivatives.py`).
* The body of an activation checkpoint is inlined, its nodes tagged with their `Region`, so that the
  passes see one flat graph; the outline pass folds it back. A `nested_compile_region` is inlined.
* torch's linear cross entropy in chunks becomes ours, which the loss scale reaches.
* Two losses that torch computes otherwise where it traces them, in any compiled graph, are put
  right: `F.multilabel_margin_loss` counts the labels after the first -1, which end a sample's list;
  and of one sample without a batch, the loss of both is a row of one (torch 2.12 to 2.14).
* `set_grad_enabled` stays in the graph; every node records the mode it runs in (`"mp_grad"`).
* Autocast regions leave the graph; every node records the innermost one (`"mp_autocast"`), which
  may be around the whole graph (`surroundings.py`). An autocast around the whole call is
  ignored: the program is captured in FP32 all the same. Only an opaque node is run inside the
  region that it stood in.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree

from ..errors import CannotRewrite
from ..ir import Region
from ..ir.dtypes import HALF, SHORT
from ..ir.fakes import like
from ..ir.targets import CHECKPOINT, ENTER_AUTOCAST, EXIT_AUTOCAST, INVOKE_SUBGRAPH
from ..ir.units import grad_fns
from ..operators import fused_head
from ..rules import PACKETS
from ..torch_inside.graphs import CHECKPOINT_CONTEXT
from ..torch_inside.names import GET_DATA, HigherOrderOperator, pytree, torch_functions_off
from ..torch_inside.private_names import Part, why_off
from .derivatives import stretches, write_out
from .history import current_tracer, has_custom_backward, known_as_before, recorded
from .place import InFP32, ReplayState


class Replay(InFP32):
    """Runs Dynamo's graph under the tracer; keeps higher-order operators as opaque nodes."""

    def __init__(self, module: fx.GraphModule, place: ReplayState) -> None:
        super().__init__(module, place)
        self.current: fx.Node | None = None
        self._derivatives = stretches(module.graph)
        self._written_out: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        if n.target is ENTER_AUTOCAST:
            device, dtype, enabled, _cache = n.args
            self.place.autocasts.append((str(device), dtype, bool(enabled)))  # type: ignore[arg-type]
        elif n.target is EXIT_AUTOCAST:
            self.place.autocasts.pop()
        if (stretch := self._derivatives.get(n)) is not None:
            if n is stretch.nodes[0]:
                given = [self.env[node] for node in stretch.inputs]
                self._written_out.update(write_out(self.module, stretch, given, self.place))
            return self._written_out.pop(n, None)
        return super().run_node(n)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, torch.Tensor):
            # It is not an input but the tensor itself: replaying a write would change the tensor.
            raise CannotRewrite(f"the program's own tensor {target} is an attribute of it")
        return value

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with known_as_before((args, kwargs)):
            return super().call_method(target, args, kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.current is not None
        target = _INSTEAD.get(target, target)
        if target is CHECKPOINT:
            return self._inline_checkpoint(args, kwargs)
        if target is GET_DATA:
            # `x.data`: the tracer sees no operator in it, and takes the result for a constant.
            return args[0].detach()
        if target is INVOKE_SUBGRAPH:
            body, _identifier, *operands = args
            return Replay(body, self.place).run(*operands)
        if isinstance(target, HigherOrderOperator):
            return opaque_call(self.current, self.place, args, kwargs)
        if (loss := fused_head.instead_of(target, args)) is not None:
            return loss
        if target in PACKETS:
            if (why := why_off(Part.RECURRENT)) is not None:
                raise CannotRewrite(f"{Part.RECURRENT.value} on this torch ({why})")
            if self.place.autocast() is not None:
                args, kwargs = pytree.tree_map_only(torch.Tensor, _widened, (args, kwargs))
        known = grad_fns((args, kwargs))
        with recorded() as made, known_as_before((args, kwargs)):
            result = super().call_function(target, args, kwargs)
        if has_custom_backward(result, known):  # the user's function, whole in Dynamo's graph
            for node in made:
                node.graph.erase_node(node)
            return opaque_call(self.current, self.place, args, kwargs)
        return result

    def _inline_checkpoint(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        body, *operands = args
        keys = (CHECKPOINT_CONTEXT,)
        region = Region(dict(kwargs), {k: body.meta[k] for k in keys if k in body.meta})
        inside = replace(self.place, checkpoints=(*self.place.checkpoints, region))
        with recorded() as made:
            out = Replay(body, inside).run(*operands)
        for node in made:
            # an inner checkpoint has tagged its own nodes already
            node.meta.setdefault("mp_region", inside.checkpoints)
        return out


def _widened(value: torch.Tensor) -> torch.Tensor:
    """An RNN's operand under autocast, which makes all operands one dtype: here FP32. (A state that
    an earlier call under autocast returned has the low dtype.)
    """
    return value.float() if value.dtype in HALF else value


def _multilabel_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    losses: Tensor = torch.ops.mpcompile.multilabel_margin_losses.default(input, target)
    if reduce is False or reduction == "none":
        return losses
    return losses.sum() if size_average is False or reduction == "sum" else losses.mean()


def _multi_margin_loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    loss = F.multi_margin_loss(input, target, *args, **kwargs)
    return loss if target.dim() else loss.reshape(())


_INSTEAD: dict[Any, Any] = {
    F.multilabel_margin_loss: _multilabel_margin_loss,
    F.multi_margin_loss: _multi_margin_loss,
}
"""What a program calls -> what is traced instead."""


# -- calls that can't be replayed as ATen: one opaque node each, with the call that Dynamo wrote ---


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
