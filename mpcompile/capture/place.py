"""Where a node stands in the program: its grad mode, autocast region, activation checkpoints; and
the arguments of its call where the program has a low dtype of its own, as the capture has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ir import Region, is_opaque
from ..ir.targets import AUTOCAST, ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_ENABLED
from ..torch_inside.graphs import schema
from ..torch_inside.names import HigherOrderOperator, OpOverload, pytree
from .surroundings import Around


@dataclass(frozen=True)
class ReplayState:
    """The place in the program that the replay has reached, bodies included.

    Attributes:
        devices: those whose autocast regions count.
        autocasts: (device type, dtype, enabled) of the enclosing regions, outermost first.
        checkpoints: the enclosing activation checkpoints, outermost first.
        stored: the low dtype, if parameters of the program are stored in it.
    """

    devices: frozenset[str]
    autocasts: list[tuple[str, torch.dtype | None, bool]]
    checkpoints: tuple[Region, ...] = ()
    stored: torch.dtype | None = None

    @property
    def named(self) -> torch.dtype | None:
        """The dtype that the program has, and names, where the capture has FP32; None: FP32."""
        autocast = self.autocast()
        return self.stored if autocast is None else autocast[1]

    def autocast(self) -> tuple[str, torch.dtype | None] | None:
        """Device type and dtype of the autocast in force here."""
        relevant = [region for region in self.autocasts if region[0] in self.devices]
        device, dtype, enabled = relevant[-1] if relevant else ("", None, False)
        return (device, dtype) if enabled else None


def record_modes(graph: fx.Graph, around: Around) -> None:
    """Write each node's grad mode and autocast region into its meta; drop the autocast nodes."""
    grad = True
    stack = [around.region]
    program = [n for n in graph.nodes if not is_opaque(n) or n.target not in AUTOCAST]
    for node in program:
        if node.target is SET_GRAD_ENABLED:
            grad = bool(node.args[0])
        elif node.target is ENTER_AUTOCAST:
            device, dtype, enabled, _cache = node.args
            stack.append((bool(enabled), dtype) if device in around.devices else stack[-1])
        elif node.target is EXIT_AUTOCAST:
            stack.pop()
        node.meta["mp_grad"] = grad
        node.meta["mp_autocast"] = stack[-1]
    for node in reversed(program):
        if node.target in AUTOCAST:
            graph.erase_node(node)


# -- arguments -------------------------------------------------------------------------------------

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_METHODS = {"half": torch.float16, "bfloat16": torch.bfloat16}


class InFP32(fx.Interpreter):
    """Runs Dynamo's graph, or a part of it, with the program's low dtype replaced by FP32."""

    module: fx.GraphModule

    def __init__(self, gm: fx.GraphModule, place: ReplayState) -> None:
        super().__init__(gm)
        self.place = place

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Arguments:
        arguments, low = super().fetch_args_kwargs_from_env(n), self.place.named
        return arguments if low is None else _in_fp32(n, arguments, low)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method: `float` instead of the one that casts to autocast's dtype."""
        if (low := self.place.named) is not None and _METHODS.get(target) is low:
            target = "float"
        return super().call_method(target, args, kwargs)


def _in_fp32(node: fx.Node, arguments: Arguments, low: torch.dtype) -> Arguments:
    """A node's arguments, with the program's low dtype replaced by FP32 as in all the replay.

    Under autocast, or where weights are stored low, `x.to(h.dtype)` and `zeros(..., dtype=h.dtype)`
    name the dtype that h has there, and Dynamo writes down that dtype. (It is kept for `view`,
    which reinterprets bits, and for operators that aren't torch's own.)
    """
    if node.target in (*AUTOCAST, "view") or not _is_torchs(node):
        return arguments
    replaced: Arguments = pytree.tree_map(lambda a: torch.float32 if a is low else a, arguments)
    return _of_one_dtype(replaced, low) if _is_product(node) else replaced


def _of_one_dtype(operands: Arguments, low: torch.dtype) -> Arguments:
    """Operands of a product of which some are FP32 and others have autocast's dtype, all in FP32:
    an input may come out of another graph under the same autocast, and autocast is off here.
    """
    tensors = [a for a in pytree.tree_leaves(operands) if isinstance(a, torch.Tensor)]
    if not {low, torch.float32} <= {t.dtype for t in tensors}:
        return operands
    wide: Arguments = pytree.tree_map_only(
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
