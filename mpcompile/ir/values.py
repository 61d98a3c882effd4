"""What a node is, and the value it gives: as captured, and now; and the calls in the bodies of
opaque nodes, which no pass sees.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from .. import rules
from ..rules.op_names import op_key
from ..rules.table import TABLE
from ..torch_inside.graphs import schema
from ..torch_inside.names import FakeTensor, FakeTensorMode, HigherOrderOperator, OpOverload
from .shapes import Size, hint

aten = torch.ops.aten
_CASTS = re.compile(r"\.(?:to|type|type_as)\(([^()]*)")  # in a line of code: what they are given
_FP32 = re.compile(r"(?:^|[,=])\s*torch\.float(?:32)?\s*(?:,|$)")  # as an argument


def is_op(node: fx.Node) -> bool:
    """Whether the node calls an operator that computes: not a placeholder, getitem, mode switch."""
    return node.op == "call_function" and isinstance(node.target, (OpOverload, HigherOrderOperator))


def is_pointwise(node: fx.Node) -> bool:
    """Whether torch says that the operator works element by element."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def is_opaque(node: fx.Node) -> bool:
    """Whether the call stays as Dynamo wrote it: a higher-order operator, a user's function."""
    return "mp_opaque" in node.meta


def backward_is_unknown(node: fx.Node) -> bool:
    """Whether the node's backward is unknown code, or is known not to be linear."""
    if not is_op(node):
        return is_opaque(node)
    return not rule(node).linear_backward or is_foreign(node)


def is_foreign(node: fx.Node) -> bool:
    """Whether the operator is neither torch's nor ours: a library's, or the user's."""
    return op_name(node).split("::")[0] not in ("aten", "prims", "prim", "mpcompile")


def is_constant(node: fx.Node) -> bool:
    """Whether the tensor depends on no input: baked into the graph, or filled with one number."""
    if is_op(node) and rule(node).copies_constant:
        return all(is_constant(n) for n in node.all_input_nodes)
    return node.op == "get_attr" or (is_op(node) and rule(node).creates)


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def is_float_call(node: fx.Node) -> bool:
    """Whether the user asked for FP32 here: by `.float()` (Dynamo names the method), or in a line
    whose only casts name FP32. (A cast to `q.dtype` is captured as the same call.)
    """
    stack, trace = node.meta.get("source_fn_stack"), (node.stack_trace or "").splitlines()
    code = next((text for text in reversed(trace) if text.strip(" ^~")), "")
    casts = _CASTS.findall(code)
    by_dtype = bool(casts) and all(map(_FP32.search, casts))
    return by_dtype or bool(stack and stack[-1][1] == "float")


def grad_enabled(node: fx.Node) -> bool:
    """Whether grad mode is on where the node stands in the program."""
    return bool(node.meta.get("mp_grad", True))


def autocast_region(node: fx.Node) -> tuple[bool, torch.dtype | None] | None:
    """(enabled, dtype) of the user's innermost autocast region, or None outside of any."""
    return node.meta.get("mp_autocast")


def op_name(node: fx.Node) -> str:
    """`"aten::linear"`; for a target that is no operator, its Python name."""
    if is_op(node):
        return op_key(node.target)
    return getattr(node.target, "__name__", str(node.target))


def tensor(node: fx.Node) -> torch.Tensor | None:
    """The FakeTensor the node produces now, or None for other values."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def dtype(node: fx.Node) -> torch.dtype:
    """The dtype of the tensor the node produces now."""
    return value(node).dtype


def captured(node: fx.Node) -> torch.Tensor | None:
    """The FakeTensor the node produced in the FP32 program, or None for other values."""
    value = node.meta.get("mp_captured")
    return value if isinstance(value, torch.Tensor) else None


def value(node: fx.Node) -> torch.Tensor:
    """The FakeTensor the node produces now; the node must produce one."""
    found = tensor(node)
    assert found is not None
    return found


def shape(node: fx.Node) -> tuple[Size, ...]:
    """The sizes (which may be symbols) of the tensor the node produces now."""
    return tuple(value(node).shape)


def set_value(node: fx.Node, value: torch.Tensor) -> None:
    """Replace the value of an input, to change its dtype or shape."""
    node.meta["val"] = value


def fake_mode(graph: fx.Graph) -> FakeTensorMode:
    """The mode that every value in the graph belongs to."""
    values = (tensor(node) for node in graph.nodes)
    return next(v.fake_mode for v in values if isinstance(v, FakeTensor))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value that may be a tensor, a (nested) sequence of them, or neither."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)


def bytes_of(value: Any) -> int:
    """The bytes of all tensors in a value; symbolic sizes are those that it was traced with."""
    return sum(hint(x.numel()) * x.element_size() for x in tensors_of(value))


def was_f32(node: fx.Node) -> bool:
    """Whether the node produced one FP32 tensor in the captured program."""
    value = captured(node)
    return value is not None and value.dtype is torch.float32


def was_floating(node: fx.Node) -> bool:
    """Whether the node produced one tensor of floating-point numbers in the captured program."""
    value = captured(node)
    return value is not None and value.is_floating_point()


def requires_grad(node: fx.Node) -> bool:
    """Whether autograd tracks the captured value (recorded by make_fx beside the FakeTensor)."""
    meta = node.meta.get("tensor_meta")
    return bool(getattr(meta, "requires_grad", False))


def attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    """The attribute of the module that a get_attr node names: a constant tensor or a body."""
    return operator.attrgetter(str(node.target))(gm)


def float_args(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """(argument position, node) for each captured-FP32 tensor argument, lists included.

    A keyword argument counts at its position in the operator's schema.
    """
    found: list[tuple[int, fx.Node]] = []
    for position, argument in positions(node):
        nodes: list[fx.Node] = []
        map_arg(argument, nodes.append)
        found += [(position, n) for n in nodes if was_f32(n)]
    return found


def positions(node: fx.Node) -> Iterable[tuple[int, Any]]:
    """(schema position, argument) of positional and keyword arguments alike."""
    yield from enumerate(node.args)
    declared = schema(node.target).arguments if isinstance(node.target, OpOverload) else ()
    names = [argument.name for argument in declared]
    for name, argument in node.kwargs.items():
        yield (names.index(name) if name in names else -1), argument


def numbers(node: fx.Node, *, but: str = "") -> list[float]:
    """The numbers that an operator computes with: no dims, no places. Not the argument `but`."""
    if not isinstance(node.target, OpOverload):
        return []
    declared = schema(node.target).arguments
    found = []
    for i, argument in positions(node):
        is_number = isinstance(argument, (int, float)) and not isinstance(argument, bool)
        if is_number and 0 <= i < len(declared) and declared[i].name != but:
            found += [float(argument)] if str(declared[i].type) in _NUMBERS else []
    return found


# The schema types of such operands; add(x, 1e-8) passes its number as a tensor.
_NUMBERS = ("number", "Optional[number]", "Optional[float]", "Tensor")


def layout(node: fx.Node) -> tuple[Any, Any]:
    """Sizes and strides of the captured value."""
    value = captured(node)
    return (value.shape, value.stride()) if value is not None else ((), ())


def rule(node: fx.Node) -> rules.Rule:
    """The row of the operator that the node calls, or where `index_put` adds up, that of a sum, if
    the user has given it none.
    """
    adds = node.target is aten.index_put.default and True in (*node.args[3:], *node.kwargs.values())
    own, sums = rules.rule_for(node.target), aten.index_add.default
    return rules.rule_for(sums) if adds and own == TABLE[op_key(node.target)] else own


def kind(node: fx.Node) -> rules.Kind:
    """What the node does with a value; picking one of several results counts as a view."""
    return rules.Kind.VIEW if is_getitem(node) else rule(node).kind


# -- what no pass sees: the calls in the bodies of opaque nodes ------------------------------------


def hidden_calls(node: fx.Node) -> Iterator[str]:
    """The names of what an opaque node calls: its own, and those in its bodies, each as often as it
    is written, not as it runs.
    """
    module = node.graph.owning_module
    if is_opaque(node) and module is not None:
        yield from _calls(module, node)


def _calls(module: fx.GraphModule, node: fx.Node) -> Iterator[str]:
    """The calls of one node of `module`: the node itself, and the bodies among its arguments."""
    yield op_name(node)
    for argument in dict.fromkeys(node.all_input_nodes):
        body = attribute(module, argument) if argument.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            for inner in body.graph.nodes:
                if inner.op in ("call_function", "call_method"):
                    yield from _calls(body, inner)


def hidden_products(node: fx.Node) -> int:
    """How many matrix products, convolutions and attentions an opaque node holds. It stays as it
    was captured, so they run in FP32 at every level: work which could still gain. 0 under an
    autocast of the user's, which applies inside the node as always.
    """
    region = autocast_region(node)
    return 0 if region and region[0] else sum(map(rules.multiplies, hidden_calls(node)))
