"""The only file with FX mechanics: typed node meta, dtypes, casts, and the text of a graph.

Passes reach `node.meta` through this file alone. These entries are ours:

* `"val"`         the FakeTensor the node produces *now*; kept true by every rewrite (`refresh`).
* `"mp_captured"` the FakeTensor it produced in the user's FP32 program; never changes.
* `"mp_opaque"`, `"mp_region"`, `"mp_grad"`, `"mp_autocast"`: what capture recorded about the place
  the node stood in (see capture.py).
* `"mp"`          the `Mark`: what was decided about the node, by which rule, and why.
* `"mp_alignment"`, `"mp_padding"`: what was decided about the sizes of its dimensions (padding.py).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.fx.node import map_arg

from . import ops
from .padding import Alignment, Padding, Path, Size
from .policy import Precision, op_key
from .step_graph import Slot

aten = torch.ops.aten

SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.complex64: "c64", torch.complex128: "c128", torch.int64: "i64", torch.int32: "i32",
    torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Region:
    """An activation checkpoint whose body was inlined: what is needed to fold it back."""

    kwargs: dict[str, Any]
    body_meta: dict[str, Any]


def regions(node: fx.Node) -> tuple[Region, ...]:
    """The checkpoints around the node, outermost first."""
    path: tuple[Region, ...] = node.meta.get("mp_region", ())
    return path


def set_regions(nodes: Iterable[fx.Node], path: tuple[Region, ...]) -> None:
    for node in nodes:
        node.meta["mp_region"] = path


@dataclass(frozen=True)
class Mark:
    """A decision about one node.

    Attributes:
        precision: LOW or FULL once planned; KEEP leaves captured dtypes; FOLLOW is undecided.
        rule: who decided: "table", "policy", "guard", "region", "plan", "kernel", "alias", ...
        reason: one sentence for people.
        low: the low dtype this node runs in (an autocast region may name another than the rest).
    """

    precision: Precision
    rule: str
    reason: str
    low: torch.dtype


def mark(node: fx.Node) -> Mark:
    """The node's decision; classify gives one to every node that computes a tensor."""
    return node.meta["mp"]  # type: ignore[no-any-return]


def precision(node: fx.Node) -> Precision | None:
    """The node's class, or None for inputs, constants and the output."""
    return node.meta["mp"].precision if "mp" in node.meta else None


def is_marked(node: fx.Node) -> bool:
    return "mp" in node.meta


def set_mark(node: fx.Node, value: Mark) -> None:
    node.meta["mp"] = value


def set_mutable(node: fx.Node) -> None:
    """Note that some node writes this value's memory: a cast of it must be taken where it is used,
    never shared.
    """
    node.meta["mp_mutable"] = True


def set_copy(node: fx.Node, *, of: int) -> None:
    """Note that this input is the working copy, in the low dtype, of the parameter that the caller
    hands over as input `of`.
    """
    node.meta["mp_copy"] = of


def copy_of(node: fx.Node) -> int | None:
    """Of which input (by number) this one is the working copy, if it is one."""
    return node.meta.get("mp_copy")


def is_mutable(node: fx.Node) -> bool:
    return "mp_mutable" in node.meta


def set_stored_low(node: fx.Node) -> None:
    """Note that the node's FP32 result is rounded to the low dtype where it is made."""
    node.meta["mp_stored_low"] = True


def is_stored_low(node: fx.Node) -> bool:
    return "mp_stored_low" in node.meta


def set_costs(node: fx.Node, value: dict[str, dict[str, int]]) -> None:
    """Note what either precision would cost: "low", "full" -> term -> bytes of traffic."""
    node.meta["mp_costs"] = value


def costs(node: fx.Node) -> dict[str, dict[str, int]] | None:
    """What the planner weighed, or None where it had nothing to decide."""
    found: dict[str, dict[str, int]] | None = node.meta.get("mp_costs")
    return found


def set_alignment(node: fx.Node, value: Alignment) -> None:
    node.meta["mp_alignment"] = value


def alignment(node: fx.Node) -> Alignment | None:
    """What was decided about the dims of a product, or None for other nodes."""
    found: Alignment | None = node.meta.get("mp_alignment")
    return found


def set_padding(node: fx.Node, value: Padding) -> None:
    node.meta["mp_padding"] = value


def padding(node: fx.Node) -> Padding | None:
    """The shapes that the node is to read and to give, or None: as captured."""
    found: Padding | None = node.meta.get("mp_padding")
    return found


def remark(node: fx.Node, **changes: Any) -> None:
    node.meta["mp"] = replace(node.meta["mp"], **changes)


# -- values and dtypes --------------------------------------------------------------------------


def is_op(node: fx.Node) -> bool:
    """Whether the node calls an operator that computes: no placeholder, getitem or mode switch."""
    return node.op == "call_function" and isinstance(
        node.target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)
    )


def is_opaque(node: fx.Node) -> bool:
    """A call kept just as Dynamo wrote it: a higher-order operator, a functorch transform."""
    return "mp_opaque" in node.meta


def in_functorch(node: fx.Node) -> bool:
    """Whether the node stands between the entry and the exit of a functorch transform."""
    return node.meta.get("mp_opaque") == "functorch"


def backward_is_unknown(node: fx.Node) -> bool:
    """Whether the node's backward is code that nobody here knows, or known not to be linear."""
    if not is_op(node):
        return is_opaque(node) and not in_functorch(node)
    if op_name(node) in ops.NONLINEAR_BACKWARD:
        return True
    namespace = op_name(node).split("::")[0]
    return namespace not in ("aten", "prims", "prim", "mpcompile")


def is_constant(node: fx.Node) -> bool:
    """A tensor that depends on no input: baked into the graph, or made of one number."""
    if is_op(node) and op_name(node) in ops.COPIES_A_CONSTANT:
        return all(is_constant(n) for n in node.all_input_nodes)
    return node.op == "get_attr" or (is_op(node) and op_name(node) in ops.CREATES)


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def is_float_call(node: fx.Node) -> bool:
    """Whether the user wrote `.float()` here (Dynamo names the method in the node's provenance)."""
    stack = node.meta.get("source_fn_stack")
    return stack is not None and len(stack) > 0 and stack[-1][1] == "float"


def grad_enabled(node: fx.Node) -> bool:
    """Whether autograd records what happens at this place of the program."""
    return bool(node.meta.get("mp_grad", True))


def autocast_region(node: fx.Node) -> tuple[bool, torch.dtype | None] | None:
    """(enabled, dtype) of the innermost autocast region of the user's own, or None outside."""
    region: tuple[bool, torch.dtype | None] | None = node.meta.get("mp_autocast")
    return region


def op_name(node: fx.Node) -> str:
    """`"aten::linear"`, or for what is no operator its Python name."""
    if is_op(node):
        return op_key(node.target)
    return getattr(node.target, "__name__", str(node.target))


def tensor(node: fx.Node) -> torch.Tensor | None:
    """The FakeTensor the node produces now, or None for tuples, ints and nothing."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def dtype(node: fx.Node) -> torch.dtype:
    """The dtype of the tensor the node produces now."""
    return value(node).dtype


def captured(node: fx.Node) -> torch.Tensor | None:
    """The FakeTensor it produced in the FP32 program."""
    value = node.meta.get("mp_captured")
    return value if isinstance(value, torch.Tensor) else None


def value(node: fx.Node) -> torch.Tensor:
    """The FakeTensor the node produces now; it must be one."""
    found = tensor(node)
    assert found is not None
    return found


def shape(node: fx.Node) -> tuple[Size, ...]:
    """The sizes, symbols among them, of the tensor the node produces now."""
    return tuple(value(node).shape)


def set_dtype(node: fx.Node, dtype: torch.dtype) -> None:
    """Change the dtype of an input."""
    old = value(node)
    with fake_mode(node.graph):
        like = torch.empty_strided(old.shape, old.stride(), dtype=dtype, device=old.device)
    set_value(node, like)


def set_value(node: fx.Node, value: torch.Tensor) -> None:
    """Change what an input holds: its dtype, its shape."""
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


def was_f32(node: fx.Node) -> bool:
    """Whether the node produced one FP32 tensor in the captured program."""
    value = captured(node)
    return value is not None and value.dtype is torch.float32


def is_floating(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def is_parameter(node: fx.Node) -> bool:
    """Whether the node is an input that holds an nn.Parameter."""
    return bool(node.meta.get("mp_parameter", False))


def is_gradient(node: fx.Node) -> bool:
    """Whether the node is an input that holds the `.grad` of some tensor."""
    return bool(node.meta.get("mp_gradient", False))


def requires_grad(node: fx.Node) -> bool:
    """Whether autograd tracks the captured value (recorded by make_fx beside the FakeTensor)."""
    meta = node.meta.get("tensor_meta")
    return bool(getattr(meta, "requires_grad", False))


def attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    """What a get_attr node names on its module: a constant tensor or a body."""
    value: Any = gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def storage(node: fx.Node) -> int | None:
    """Identity of the memory under the captured value; equal for aliases."""
    value = captured(node)
    if value is None or value.layout is not torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


def shares_memory(a: fx.Node, b: fx.Node) -> bool:
    """Whether captured values, or parts of them, lie in the same memory."""
    return not memory(a.meta.get("mp_captured")).isdisjoint(memory(b.meta.get("mp_captured")))


def memory(value: Any) -> set[int]:
    """Identity of the memory under a value, or under its parts."""
    strided = (t for t in tensors_of(value) if t.layout is torch.strided)
    return {int(t.untyped_storage()._cdata) for t in strided}


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
    if node.kwargs and isinstance(node.target, torch._ops.OpOverload):
        names = [argument.name for argument in node.target._schema.arguments]
        for name, argument in node.kwargs.items():
            yield (names.index(name) if name in names else -1), argument
    else:
        for argument in node.kwargs.values():
            yield -1, argument


def layout(node: fx.Node) -> tuple[Any, Any]:
    """Sizes and strides of the captured value."""
    value = captured(node)
    return (value.shape, value.stride()) if value is not None else ((), ())


def written(node: fx.Node) -> list[fx.Node]:
    """The values that the node writes in place, as far as its own arguments go."""
    if is_opaque(node):
        name = op_name(node)
        writes = (
            name == "setitem" or name.endswith("_") if in_functorch(node)
            else _marks_dirty(node) if is_op(node)
            else True  # a function of the user's: nobody knows
        )  # fmt: skip
        return list(node.all_input_nodes) if writes else []
    places = ops.written_args(node.target)
    return [a for i, a in positions(node) if i in places and isinstance(a, fx.Node)]


# Dynamo tells which operands an autograd.Function marks as dirty from torch 2.13 on.
_DIRTY_IS_TOLD = torch.__version__ >= "2.13"


def _marks_dirty(node: fx.Node) -> bool:
    """Whether an autograd.Function writes what it is given, and says so (`mark_dirty`).

    Where Dynamo doesn't tell (read in torch 2.11), one whose forward writes anything in place.
    """
    if _DIRTY_IS_TOLD or not op_name(node).endswith("autograd_function_apply"):
        return "dirty_idx" in node.kwargs
    forward = attribute(node.graph.owning_module, node.args[0])  # type: ignore[arg-type]
    return any(_is_a_write(n) for n in forward.graph.nodes if n.op.startswith("call"))


def _is_a_write(node: fx.Node) -> bool:
    """Of a program that nobody has traced: `x.add_(y)`, `x += y`, `x[0] = y`, `out=`, `inplace=`"""
    name = node.target if isinstance(node.target, str) else op_name(node)
    named = name.endswith("_") and not name.startswith("__")
    assigned = name == "__setitem__" or node.target in _ASSIGNMENTS
    return named or assigned or bool(node.kwargs.get("inplace")) or "out" in node.kwargs


_ASSIGNMENTS = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv,
    operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul, operator.iand,
    operator.ior, operator.ixor, operator.ilshift, operator.irshift,
}  # fmt: skip


def kind(node: fx.Node) -> ops.Kind:
    if is_getitem(node):
        return ops.Kind.VIEW
    rule = ops.rule_for(node.target)
    return rule.kind if rule else ops.Kind.COMPUTE


# -- sizes --------------------------------------------------------------------------------------


def known_equal(a: Size, b: Size) -> bool:
    """Whether two sizes are equal whatever the symbols in them; adds no guard."""
    return bool(symbolic_shapes.statically_known_true(a == b))


def known_multiple(size: Size, of: int) -> bool:
    """Whether a size is a multiple of a number whatever the symbols in it; adds no guard."""
    return bool(symbolic_shapes.statically_known_true(size % of == 0))


def known_below(a: Size, b: Size) -> bool:
    """Whether a size is smaller than another whatever the symbols in them; adds no guard."""
    return bool(symbolic_shapes.statically_known_true(a < b))


def same_shape(a: Iterable[Size], b: Iterable[Size]) -> bool:
    """Whether two shapes are equal whatever the symbols in them; adds no guard."""
    left, right = tuple(a), tuple(b)
    return len(left) == len(right) and all(map(known_equal, left, right))


def hint(size: Size) -> int:
    """The size in the inputs that were traced: for estimates only; adds no guard."""
    if isinstance(size, int):
        return size
    # One function under two names: torch 2.11 has size_hint, 2.13 has optimization_hint.
    name = "optimization_hint" if hasattr(symbolic_shapes, "optimization_hint") else "size_hint"
    find = getattr(symbolic_shapes, name)
    return int(find(size, fallback=1))


# -- operands -----------------------------------------------------------------------------------


def operands(node: fx.Node) -> dict[Path, fx.Node]:
    """The node's operands that are nodes, by where they stand."""
    found: dict[Path, fx.Node] = {}
    for position, argument in positions(node):
        if isinstance(argument, fx.Node):
            found[position,] = argument
        elif isinstance(argument, (tuple, list)):
            for i, item in enumerate(argument):
                if isinstance(item, fx.Node):
                    found[position, i] = item
    return found


def set_operand(node: fx.Node, path: Path, value: fx.node.Argument) -> None:
    """Put something else where an operand stands."""
    position, *rest = path
    if position < len(node.args):
        node.update_arg(position, _replaced(node.args[position], rest, value))
        return
    name = node.target._schema.arguments[position].name  # type: ignore[union-attr]
    node.update_kwarg(name, _replaced(node.kwargs.get(name), rest, value))


def _replaced(argument: fx.node.Argument, path: list[int], value: fx.node.Argument) -> Any:
    if not path:
        return value
    items = list(argument)  # type: ignore[arg-type]
    items[path[0]] = value
    return items


def argument(node: fx.Node, name: str) -> Any:
    """An operator's argument by its name in the schema; its default where it isn't given."""
    for position, declared in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if declared.name == name:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, declared.default_value)
    raise KeyError(f"{node.target} has no argument {name!r}")


def position_of(node: fx.Node, name: str) -> int:
    """The place of an argument in the operator's schema."""
    names = [declared.name for declared in node.target._schema.arguments]  # type: ignore[union-attr]
    return names.index(name)


# -- rewriting ----------------------------------------------------------------------------------


def refresh(node: fx.Node) -> None:
    """Recompute `meta["val"]` from the inputs' values; call it when an input changed dtype."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    # The mode is on, so that what a decomposition creates (SDPA makes a mask) is fake too.
    with fake_mode(node.graph), enable_python_dispatcher():
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def restore(node: fx.Node) -> None:
    """Set `meta["val"]` back to what was captured; call it once the inputs are as captured."""
    node.meta["val"] = node.meta["mp_captured"]


def insert(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    *,
    name: str,
    like: fx.Node,
    decision: Mark,
) -> fx.Node:
    """Add a call at the graph's insertion point, with its value and with `like`'s provenance."""
    node = graph.create_node("call_function", target, args, name=name)
    for key in ("stack_trace", "nn_module_stack", "mp_region", "mp_grad"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    refresh(node)
    set_mark(node, decision)
    return node


def after(node: fx.Node) -> fx.Node:
    """The first node before which a consumer of `node` may stand: inputs stay in one block."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following


def is_cast(node: fx.Node) -> bool:
    """A cast of ours (captured programs may hold `aten.to` of their own)."""
    return node.target is aten.to.dtype and is_marked(node) and mark(node).rule == "cast"


def copies_for_overlap(node: fx.Node) -> bool:
    """Whether the node is, scaled or not, the copy of a result that overlaps (copy_overlaps)."""
    while is_marked(node) and mark(node).rule == "scale":
        node = node.all_input_nodes[0]
    return is_marked(node) and mark(node).rule == "copy"


def is_write_back(node: fx.Node) -> bool:
    """Whether the node writes an input of the graph, and autograd sees it (scale_gradients)."""
    return node.target is aten.copy_.default and is_marked(node) and mark(node).rule == "scale"


# -- graphs of optimizer steps --------------------------------------------------------------------


def slots(graph: fx.Graph) -> dict[Slot, fx.Node]:
    """The inputs of a step's graph by what they are."""
    return {node.meta["mp_slot"]: node for node in graph.find_nodes(op="placeholder")}


def set_slot(node: fx.Node, slot: Slot) -> None:
    """Say what an input of a step's graph is; it is named after that."""
    node.meta["mp_slot"] = slot
    node._rename(str(slot))


def slot_of(node: fx.Node) -> Slot:
    """What the input of a step's graph is."""
    found: Slot = node.meta["mp_slot"]
    return found


def scalar_slot(graph: fx.Graph, wanted: Slot, dtype: torch.dtype) -> fx.Node:
    """The 0-d input `wanted`, on the device of the others; added, if it isn't there yet."""
    known = slots(graph)
    if wanted not in known:
        device = value(next(iter(known.values()))).device
        with fake_mode(graph):
            return add_slot(graph, wanted, torch.empty((), dtype=dtype, device=device))
    return known[wanted]


def scale_slot(
    graph: fx.Graph, index: int, key: str, dtype: torch.dtype = torch.float32
) -> fx.Node:
    """The 0-d input that holds one field of a loss scale's state."""
    return scalar_slot(graph, Slot("scale", index, key), dtype)


def add_input(graph: fx.Graph, name: str, val: torch.Tensor, like: fx.Node) -> fx.Node:
    """A new input behind the last one, tracked by autograd as `like` is."""
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    node._dynamo_source = None
    # With "tensor_dict" Dynamo says that a parameter keeps its address.
    kept = ("mp_captured", "tensor_meta", "tensor_dict")
    node.meta.update({k: like.meta[k] for k in kept if k in like.meta}, val=val)
    return node


def become_number(node: fx.Node) -> None:
    """Turn an input that is a symbolic number into the 0-d FP64 tensor that holds it."""
    device = value(next(iter(slots(node.graph).values()))).device
    with fake_mode(node.graph):
        node.meta["val"] = torch.empty((), dtype=torch.float64, device=device)


def add_slot(graph: fx.Graph, wanted: Slot, value: torch.Tensor) -> fx.Node:
    """A new input, behind the last one."""
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        node = graph.placeholder(str(wanted))
    set_slot(node, wanted)
    node.meta["val"] = value
    return node


def writes(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node, fx.Node]]:
    """What a step's graph writes: (the `copy_` node, the input it writes, the value)."""
    found = graph.find_nodes(op="call_function", target=aten.copy_.default)
    return [(node, *node.all_input_nodes) for node in found]


def note(gm: fx.GraphModule, name: str, value: Any) -> None:
    """Leave something for a later pass over the same step."""
    gm.meta.setdefault("mp_notes", {})[name] = value


def noted(gm: fx.GraphModule, name: str) -> Any:
    """What an earlier pass left, or None."""
    return gm.meta.get("mp_notes", {}).get(name)


def first_call(graph: fx.Graph) -> fx.Node:
    """The first node that is no input: what stands before it runs before everything else."""
    first: fx.Node = next(node for node in graph.nodes if node.op != "placeholder")
    return first


def call(
    graph: fx.Graph, target: Any, *args: Any, why: str, name: str = "", **kwargs: Any
) -> fx.Node:
    """Add a call to a step's graph at its insertion point, with its value and its reason."""
    node = graph.create_node("call_function", target, args, kwargs, name=name or None)
    refresh(node)
    set_mark(node, Mark(Precision.KEEP, "step", why, torch.float32))
    return node


# -- provenance and text --------------------------------------------------------------------------


def module_path(node: fx.Node) -> str:
    """Dotted path of the module that made the node (`"layers.0.fc1"`), or the empty string."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    path = re.sub(r"\._modules\['([^']*)'\]|\[['\"]?([^'\"\]]*)['\"]?\]",
                  lambda m: "." + (m.group(1) or m.group(2)), path)  # fmt: skip
    head, _, rest = path.partition(".")  # "L.self.layers.0": drop the variable Dynamo names
    return rest.partition(".")[2] if head in ("L", "G") else path


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in .*\n\s*(?P<code>.*)')


def source(node: fx.Node) -> str:
    """`"model.py:12"`: the innermost user frame that made the node, or the empty string."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not frames:
        return ""
    return f"{frames[-1]['file'].rsplit('/', 1)[-1]}:{frames[-1]['line']}"


def type_text(value: Any) -> str:
    """`f16[4, 3]`; tuples in parentheses; symbolic sizes by name."""
    if isinstance(value, torch.Tensor):
        return (
            f"{SHORT.get(value.dtype, str(value.dtype))}[{', '.join(str(s) for s in value.shape)}]"
        )
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type_text(v) for v in value)})"
    return type(value).__name__


def _argument_text(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, (tuple, list)):
        return f"[{', '.join(_argument_text(a) for a in argument)}]"
    return (
        SHORT.get(argument, str(argument)) if isinstance(argument, torch.dtype) else repr(argument)
    )


def line(node: fx.Node) -> str:
    """One node as text: `linear: f16[4, 3] = linear(x, weight)`."""
    arguments = [_argument_text(a) for a in node.args]
    if node.op == "placeholder":
        return f"{node.name}: {type_text(node.meta.get('val'))} = input"
    if node.op == "output":
        results = node.args[0] if isinstance(node.args[0], (tuple, list)) else node.args
        return f"return {', '.join(map(_argument_text, results))}"
    arguments += [f"{k}={_argument_text(v)}" for k, v in node.kwargs.items()]
    if node.op == "get_attr":
        return f"{node.name} = self.{node.target}"
    name = op_name(node).removeprefix("aten::")
    return f"{node.name}: {type_text(node.meta.get('val'))} = {name}({', '.join(arguments)})"


def render(graph: fx.Graph, *, reasons: bool = False) -> str:
    """The whole graph as text, a line a node; with `reasons`, why each decided line is as it is."""
    lines = []
    for node in graph.nodes:
        text = line(node)
        if reasons and is_marked(node):
            decision = mark(node)
            where = ", ".join(filter(None, (module_path(node), source(node))))
            text = f"{text:<72}  # {decision.precision.value}: {decision.reason}"
            text += f" [{decision.rule}]" + (f" ({where})" if where else "")
        lines.append(text)
    return "\n".join(lines) + "\n"
