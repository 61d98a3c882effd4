"""The interpreter that runs Dynamo's graph again under the tracer.

The interpreter handles itself what a replay would lose:

* A higher-order operator (autograd.Function, cond, flex_attention) stays one opaque node. Traced
  through, `autograd.Function` would silently lose its backward.
* So does a function that calls such an operator unseen by Dynamo (`torch._dynamo.allow_in_graph`).
* The nodes between the entry and the exit of a functorch transform (`torch.vmap`,
  `torch.func.grad`) stay as Dynamo wrote them.
* The body of an activation checkpoint is inlined, its nodes tagged with their `Region`, so that the
  passes see one flat graph; the outline pass folds it back. A `nested_compile_region` is inlined.
* `set_grad_enabled` stays in the graph; every node records the mode it runs in (`"mp_grad"`).
* Autocast regions leave the graph; every node records the innermost one (`"mp_autocast"`), which
  may be around the whole graph (`regions.py`). An autocast around the whole call is ignored: the
  program is captured in FP32 all the same. Only an opaque node is run inside the region that it
  stood in.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..errors import CannotRewrite
from ..ir import Region
from ..ir.dtypes import HALF
from ..ir.targets import (
    AUTOCAST,
    CHECKPOINT,
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    INVOKE_SUBGRAPH,
    nesting,
)
from ..ir.units import grad_fns
from ..rules import PACKETS
from ..torch_inside import pytree
from ..torch_inside.autograd import GET_DATA
from ..torch_inside.graphs import CHECKPOINT_CONTEXT
from ..torch_inside.health import why_off
from ..torch_inside.ops import HigherOrderOperator, OpOverload, schema
from ..torch_inside.private_names import Part
from .history import current_tracer, has_custom_backward, known_as_before
from .opaque_calls import opaque_call
from .place import Place

_METHODS = {"half": torch.float16, "bfloat16": torch.bfloat16}


class Replay(fx.Interpreter):
    """Runs Dynamo's graph under the tracer; keeps higher-order operators as opaque nodes."""

    def __init__(self, module: fx.GraphModule, place: Place) -> None:
        super().__init__(module)
        self.place = place
        self.functorch_depth = 0
        self.current: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        if n.target is ENTER_AUTOCAST:
            device, dtype, enabled, _cache = n.args
            self.place.autocasts.append((str(device), dtype, bool(enabled)))  # type: ignore[arg-type]
        elif n.target is EXIT_AUTOCAST:
            self.place.autocasts.pop()
        if n.op in ("call_function", "call_method") and self._in_functorch(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return opaque_call(n, self.place, args, kwargs, "functorch")
        return super().run_node(n)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The node's arguments, with the program's low dtype replaced by FP32 as in all the replay.

        Under autocast, or where weights are stored low, `x.to(h.dtype)` and `zeros(...,
        dtype=h.dtype)` name the dtype that h has there, and Dynamo writes down that dtype. (It is
        kept for `view`, which reinterprets bits, and for operators that aren't torch's own.)
        """
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        low = self.place.named
        if low is None or n.target in (*AUTOCAST, "view") or not _is_torchs(n):
            return args, kwargs
        replaced: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
            lambda a: torch.float32 if a is low else a, (args, kwargs)
        )
        return _of_one_dtype(replaced, low) if _is_product(n) else replaced

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, torch.Tensor):
            # It is not an input but the tensor itself: replaying a write would change the tensor.
            raise CannotRewrite(f"the program's own tensor {target} is an attribute of it")
        return value

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.place.named is not None and _METHODS.get(target) is self.place.named:
            target = "float"
        with known_as_before((args, kwargs)):
            return super().call_method(target, args, kwargs)

    def _in_functorch(self, n: fx.Node) -> bool:
        """Whether the node belongs to a functorch transform, its entry and exit included."""
        inside = self.functorch_depth > 0
        self.functorch_depth += nesting(n)
        return (
            inside
            or self.functorch_depth > 0
            or getattr(n.target, "__module__", "").startswith("torch._functorch")
        )

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.current is not None
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
        if target in PACKETS:
            if (why := why_off(Part.RECURRENT)) is not None:
                raise CannotRewrite(f"{Part.RECURRENT.value} on this torch ({why})")
            if self.place.autocast() is not None:
                args, kwargs = pytree.tree_map_only(torch.Tensor, _widened, (args, kwargs))
        graph = current_tracer().graph
        before, known = len(graph.nodes), grad_fns((args, kwargs))
        with known_as_before((args, kwargs)):
            result = super().call_function(target, args, kwargs)
        if has_custom_backward(result, known):  # the user's function, whole in Dynamo's graph
            for node in reversed(list(itertools.islice(graph.nodes, before, None))):
                graph.erase_node(node)
            return opaque_call(self.current, self.place, args, kwargs)
        return result

    def _inline_checkpoint(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        body, *operands = args
        keys = (CHECKPOINT_CONTEXT,)
        region = Region(dict(kwargs), {k: body.meta[k] for k in keys if k in body.meta})
        graph = current_tracer().graph
        before = len(graph.nodes)
        inside = replace(self.place, checkpoints=(*self.place.checkpoints, region))
        out = Replay(body, inside).run(*operands)
        for node in itertools.islice(graph.nodes, before, None):
            # an inner checkpoint has tagged its own nodes already
            node.meta.setdefault("mp_region", inside.checkpoints)
        return out


def _widened(value: torch.Tensor) -> torch.Tensor:
    """An RNN's operand under autocast, which makes all operands one dtype: here FP32. (A state that
    an earlier call under autocast returned has the low dtype.)
    """
    return value.float() if value.dtype in HALF else value


def _of_one_dtype(
    operands: tuple[tuple[Any, ...], dict[str, Any]], low: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Operands of a product of which some are FP32 and others have autocast's dtype, all in FP32:
    an input may come out of another graph under the same autocast, and autocast is off here.
    """
    tensors = [a for a in pytree.tree_leaves(operands) if isinstance(a, torch.Tensor)]
    if not {low, torch.float32} <= {t.dtype for t in tensors}:
        return operands
    wide: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
        torch.Tensor, lambda t: t.float() if t.dtype is low else t, operands
    )
    return wide


# What autocast runs in its dtype, and what fails without it if operands differ in dtype. None of
# these writes to an operand or returns a view of one: that would be lost with a widened copy.
_PRODUCTS = frozenset(
    f"conv{kind}" for kind in ("1d", "2d", "3d", "_tbc", "_transpose1d", "_transpose2d",
                               "_transpose3d", "olution")
) | {
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "addmm", "addbmm",
    "baddbmm", "addmv", "bilinear", "einsum", "tensordot", "multi_dot", "chain_matmul", "cdist",
    "scaled_dot_product_attention",
}  # fmt: skip


def _is_product(node: fx.Node) -> bool:
    """Whether the node makes a new tensor of a product of its operands: not `out=`."""
    target: Any = node.target
    if isinstance(target, OpOverload):
        return target.overloadpacket.__name__ in _PRODUCTS and not schema(target).is_mutable
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name in _PRODUCTS and "out" not in node.kwargs


def _is_torchs(node: fx.Node) -> bool:
    """Whether the node calls a method, a function or an ATen operator of torch's own."""
    module = getattr(node.target, "__module__", None) or "torch"
    package = ".".join(module.split(".")[:3])
    custom = package.startswith("torch._ops.") and package != "torch._ops.aten"
    higher = isinstance(node.target, HigherOrderOperator)
    own = node.op == "call_method" or module.split(".")[0] in ("torch", "_operator")
    return node.op in ("call_function", "call_method") and own and not custom and not higher
