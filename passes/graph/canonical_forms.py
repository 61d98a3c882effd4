"""Write operators in the forms that the rules know. Rewriting passes; they need no marks.

**`functionalize`** makes in-place ops on private values out-of-place.

    h = linear(x, w)                 h = linear(x, w)
    relu_ = relu_(h)        ->       relu = relu(h)
    return mul(h, 2)                 return mul(relu, 2)

An in-place op writes through its memory; after a cast of the written value, the write would change
the cast and not the value. So an op is rewritten only where the difference can't be observed: the
memory was made in this graph (by no input, no constant), no other live value shares it (a base, a
view), and the functional form has the same dtype and shape. Nor is one that runs under no_grad: out
of place, its result would have no history.

What stays in place is left to classify, which keeps the captured dtypes of everything that shares
the memory. A product may run low all the same: what is written is a copy of its result.

**`name_squares`** names `x * x` `square(x)`: the same numbers, forward and backward.

    mul(h, h)    ->    square(h)

A product of two values keeps their magnitude, as a rule: `mul` follows its operands. A square
leaves FP16's range from 256 on and reaches zero from 2**-12 down, so `square` is FP32 (rules).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from mpcompile import ir, rules
from mpcompile.ir import aten
from mpcompile.ir.fakes import like
from mpcompile.rules.policy import Config, Precision
from mpcompile.torch_inside.graphs import schema
from mpcompile.torch_inside.names import OpOverload


def functionalize(gm: fx.GraphModule, config: Config) -> bool:
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    sharing: dict[int | None, list[fx.Node]] = defaultdict(list)
    for node in order:
        sharing[ir.storage(node)].append(node)
    changed = False
    for node in order:
        functional = _functional_form(node)
        if functional is not None and _is_private(node, sharing, order):
            target: Any = node.args[0]
            target.replace_all_uses_with(node, lambda user, at=order[node]: order[user] > at)
            node.target, changed = functional, True
    written = {ir.storage(target) for node in order for target in ir.written(node)}
    for node in order:
        shown = ir.was_f32(node) and ir.storage(node) in written
        if shown and ir.rule(node).product and ir.has_own_memory(node):
            with gm.graph.inserting_after(node), ir.fake_mode(gm.graph):
                own = gm.graph.call_function(aten.clone.default, (node,))
                own.meta = dict(node.meta)
                node.meta["val"] = node.meta["mp_captured"] = like(ir.value(node))
            node.replace_all_uses_with(own, lambda user, own=own: user is not own)
            changed = True
    return changed


def _functional_form(node: fx.Node) -> OpOverload | None:
    """`relu` for `relu_`, or None unless the functional call gives the same dtype and shape."""
    if not ir.is_op(node) or not isinstance(node.target, OpOverload):
        return None
    namespace, name = ir.op_name(node).split("::")
    if not name.endswith("_") or rules.written_args(node.target) != {0}:
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    # By its arguments: pow_.Scalar's is pow.Tensor_Scalar; polygamma(n, self) is none of
    # polygamma_(self, n).
    meant = _arguments(node.target)
    known = (getattr(packet, one) for one in (packet.overloads() if packet is not None else ()))
    overload = next((one for one in known if _arguments(one) == meant), None)
    if overload is None or rules.rule_for(overload).precision is Precision.KEEP:
        return None
    written, *others = (t for n in node.all_input_nodes if (t := ir.captured(n)) is not None)
    after = ir.captured(node)
    alike = after is not None and written.shape == after.shape
    # In place the result keeps the written dtype; out of place it would be promoted.
    alike &= all(torch.promote_types(written.dtype, t.dtype) is written.dtype for t in others)
    return overload if alike else None


def _arguments(op: OpOverload) -> list[tuple[str, str]]:
    """Names and types of what it takes."""
    return [(argument.name, str(argument.type)) for argument in schema(op).arguments]


def _is_private(
    node: fx.Node, sharing: dict[int | None, list[fx.Node]], order: dict[fx.Node, int]
) -> bool:
    target = node.args[0]
    assert isinstance(target, fx.Node)
    memory = ir.storage(target)
    maker = target.args[0] if ir.is_getitem(target) else target
    if memory is None or target.op != "call_function" or ir.is_opaque(maker):  # type: ignore[arg-type]
        return False
    if not ir.grad_enabled(node):  # a value that autograd may track must stay the same
        return False
    at = order[node]
    given = any(other.op in ("placeholder", "get_attr") for other in sharing[memory])
    before = [n for n in sharing[memory] if n not in (target, node) and order[n] < at]
    return not (given or any(order[user] > at for n in before for user in n.users))


def name_squares(gm: fx.GraphModule, config: Config) -> bool:
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        value = node.args[0]
        if node.args == (value, value) and ir.was_floating(node):
            node.target, node.args = aten.square.default, (value,)
            changed = True
    return changed
