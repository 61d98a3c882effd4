"""Keep numbers on the device: no graph of a step reads a tensor's value. A rewriting pass.

    item = _local_scalar_dense(lr)                      mul = mul(g, lr)
    add(p, g, alpha=item)                        ->     add(p, mul)

torch.optim writes `p.add_(g, alpha=-lr)`; with a tensor for a learning rate that is a read from the
device, which would make the host wait in every step.
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import ir
from mpcompile.errors import CannotRewrite
from mpcompile.ir import aten
from mpcompile.step import StepConfig

_TO = aten._to_copy.default
_WHY = "the number stays on the device"


def lift_numbers(gm: fx.GraphModule, config: StepConfig) -> bool:
    items = gm.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    for item in items:
        for user in list(item.users):
            with gm.graph.inserting_before(user):
                user.replace_all_uses_with(_lifted(gm.graph, user, item, item.args[0]))
            gm.graph.erase_node(user)
        gm.graph.erase_node(item)
    return bool(items)


def _lifted(graph: fx.Graph, user: fx.Node, item: fx.Node, number: fx.Node) -> fx.Node:
    """The value of `user`, computed from the 0-d tensor instead of the number read from it."""

    def call(target: torch._ops.OpOverload, *args: object) -> fx.Node:
        return ir.call(graph, target, *args, why=_WHY)

    def widened(b: fx.Node) -> fx.Node:  # the operator rounds once, in the wider dtype
        wide = ir.dtype(user)
        return b if ir.dtype(b) is wide else ir.call(graph, _TO, b, why=_WHY, dtype=wide)

    match user.target, user.args, dict(user.kwargs):
        case ((aten.add.Tensor | aten.sub.Tensor), (a, fx.Node() as b), {"alpha": alpha}) if (
            alpha is item
        ):
            return call(user.target, a, call(aten.mul.Tensor, widened(b), number))
        case aten.addcdiv.default, (a, fx.Node() as b, c), {"value": value} if value is item:
            quotient = call(aten.div.Tensor, widened(b), c)
            return call(aten.add.Tensor, a, call(aten.mul.Tensor, quotient, number))
        case aten.addcmul.default, (a, fx.Node() as b, c), {"value": value} if value is item:
            product = call(aten.mul.Tensor, widened(b), c)
            return call(aten.add.Tensor, a, call(aten.mul.Tensor, product, number))
    raise CannotRewrite(f"it needs a number read from a tensor in {ir.op_name(user)}")
