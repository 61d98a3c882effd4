"""Write operators in the forms that the rules know. Rewriting passes; they need no marks.

**`functionalize`** makes in-place ops on private values out-of-place.

    h = linear(x, w)                 h = linear(x, w)
    relu_ = relu_(h)        ->       relu = relu(h)
    return mul(h, 2)                 return mul(relu, 2)

An in-place op writes through its memory; after a cast of the written value, the write would change
the cast and not the value. So an op is rewritten only where the difference can't be observed:

* the written value's memory was made in this graph (it is no input, no constant), and
* no other live value shares it (a base, a view), and
* the functional form has the same dtype and shape, and
* the op doesn't run under no_grad: out of place, its result would have no history.

What stays in place is left to classify, which keeps the captured dtypes of everything that shares
the memory.

**`name_squares`** names `x * x` `square(x)`: the same numbers, forward and backward.

    mul(h, h)    ->    square(h)

A product of two values keeps their magnitude, as a rule: `mul` follows its operands. A square
leaves FP16's range from 256 on and reaches zero from 2**-12 down, so `square` is FP32 (rules).
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile import ir, rules
from mpcompile.ir import aten
from mpcompile.rules.policy import Config, Precision
from mpcompile.torch_inside.graphs import schema
from mpcompile.torch_inside.names import OpOverload


def functionalize(gm: fx.GraphModule, config: Config) -> bool:
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    sharing: dict[int, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if (memory := ir.storage(node)) is not None:
            sharing.setdefault(memory, []).append(node)
    changed = False
    for node in list(gm.graph.nodes):
        functional = _functional_form(node)
        if functional is None or not _is_private(node, sharing, order):
            continue
        target = node.args[0]
        node.target = functional
        target.replace_all_uses_with(node, lambda user, at=order[node]: order[user] > at)
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
    if after is None or written.shape != after.shape:
        return None
    # In place the result keeps the written dtype; out of place it would be promoted.
    if any(torch.promote_types(written.dtype, t.dtype) is not written.dtype for t in others):
        return None
    return overload  # type: ignore[no-any-return]


def _arguments(op: OpOverload) -> list[tuple[str, str]]:
    """Names and types of what it takes."""
    return [(argument.name, str(argument.type)) for argument in schema(op).arguments]


def _is_private(
    node: fx.Node, sharing: dict[int, list[fx.Node]], order: dict[fx.Node, int]
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
    for other in sharing[memory]:
        if other.op in ("placeholder", "get_attr"):
            return False
        used_later = any(order[user] > at for user in other.users)
        if other not in (target, node) and order[other] < at and used_later:
            return False
    return True


def name_squares(gm: fx.GraphModule, config: Config) -> bool:
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        value, held = node.args[0], ir.captured(node)
        if node.args == (value, value) and held is not None and held.is_floating_point():
            node.target, node.args = aten.square.default, (value,)
            changed = True
    return changed
