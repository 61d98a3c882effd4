"""What the forward keeps for the backward. Rewriting passes, on the two halves of the joint graph.

Contract. The two graphs come from AOTAutograd's partitioner. The first `own_results` results of the
forward are not for the backward. What it keeps stands behind them, in the order of the backward's
inputs, and the backward has a placeholder with the name of each such node. A pass returns whether
it changed anything.

**`keep_sources`** keeps what a tensor was cast from, and casts it again in the backward.

    forward   cast: f32 = convert(mm, f32)       (as it was: the caller gets cast)
              return (cast, ..., cast)      ->   return (cast, ..., mm)

    backward  cast: f32 = placeholder            mm: bf16 = placeholder
                                                 cast: f32 = convert(mm, f32)
              sub = sub(cast, maximum)           sub = sub(cast, maximum)

The partitioner computes casts again by itself, with two exceptions. What the backward must write
out, because a product reads it, is stored: so are the low casts of weights, though the weights are
there anyway. And what is also a result for the caller counts as written out, too: so are logits in
FP32 beside those in the low dtype that they were cast from.

So instead of a stored tensor that is a cast of something, or a view of one, the forward keeps
* the weight that it is a cast of: that costs nothing. It is handed over like any input that is
  stored, so that autograd notices if it was written before the backward;
* else what it was cast from, if that lies in less memory than all stored tensors that come of it;
* nothing, if it is a result for the caller, and some elementwise operators make it of what is kept
  besides: of soft-capped logits, the logits.
The same values go through the same operators, so that nothing changes but the memory, and what the
casts cost.

Weights whose casts are not to be kept bear `WEIGHT` among their notes. What the forward writes is
not taken. What autograd doesn't check (`UNCHECKED`) stays as it is.

**`keep_written_inputs`** keeps a copy of an input that the forward writes, where the backward reads
the input as it was.

    forward   cos = cos(x)                   forward   kept = clone(x)
              _ = copy_(x, relu)                       _ = copy_(x, relu)
              return (..., x)          ->              return (..., kept)

    backward  cos = cos(x)                   (as it was: x is what it is handed)

AOTAutograd writes an input that needs no gradient at the end of the forward. Its partitioner
doesn't heed that where it recomputes: it keeps the input itself, and the backward recomputes from
what was written (torch 2.12 and 2.13). A checkpoint that reads a value computed before the write
then gives wrong gradients. The copy costs the memory of the input, only where one would be wrong.

**`store_masks_as_bytes`** keeps masks as bytes.

    forward   le: b8 = le(relu, 0)              le: b8 = le(relu, 0)
                                                wide: f32 = convert_element_type(le, f32)
                                                kept: u8 = convert_element_type(wide, u8)
              return (..., le)             ->   return (..., kept)

    backward  le: b8 = placeholder              le: u8 = placeholder
                                                wide: f32 = convert_element_type(le, f32)
                                                mask: b8 = ne(wide, 0)
              grad = where(le, 0, tangent)      grad = where(mask, 0, tangent)

The sign of a ReLU, what a dropout kept, where a maximum was: autograd keeps them as bools. In the
C++ that Inductor writes for a CPU, a kernel that stores or loads bools takes many times as long as
with bytes, because vectors of bools are taken apart element by element (torch 2.13, AVX2 and
AVX512). By way of FP32, which holds 0 and 1, both stay vectors.
The values are the same to the bit, and so are the bytes.

Only masks that fused kernels write and read are taken: no result or operand of any other operator.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mpcompile import ir
from mpcompile.devices.registry import capabilities, is_supported
from mpcompile.ir import aten
from mpcompile.torch_inside.inductor import UNCHECKED
from mpcompile.torch_inside.names import OpOverload

WEIGHT = "mp_weight"
"""Note on an input of the forward whose memory is there as long as the model (a parameter, a
buffer), and which the backward is to cast again."""
_MOST = 16
"""Of the operators that make a result again."""
_CONVERT = torch.ops.prims.convert_element_type.default


# -- keep_sources ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cast:
    """A tensor kept for the backward: its place among the forward's results, the node, and the
    casts and views that make it of `source`, in their order.
    """

    place: int
    node: fx.Node
    source: fx.Node
    steps: tuple[fx.Node, ...]


def keep_sources(forward: fx.Graph, backward: fx.Graph, own_results: int) -> bool:
    """Rewrite both halves; see the module."""
    results: list[Any] = list(forward.output_node().args[0])  # type: ignore[arg-type]
    stored = results[own_results:]
    read = {str(n.target): n for n in backward.find_nodes(op="placeholder")}
    inner = {node.name for node in backward.nodes} - read.keys()
    kept = {place: node for place, node in enumerate(results) if place >= own_results
            and isinstance(node, fx.Node) and node.name in read}  # fmt: skip
    checked = {place: node for place, node in kept.items() if not node.meta.get(UNCHECKED)}
    written = _writes(forward)
    of_memory: dict[int | None, list[_Cast]] = {}
    for place, node in checked.items():
        cast = _cast(place, node)
        memory = ir.storage_now(cast.source) if cast is not None else None
        if cast is None or memory in written:  # the backward would read what it wrote
            continue
        if cast.source.name not in inner and not cast.source.meta.get(UNCHECKED):
            of_memory.setdefault(memory, []).append(cast)
    dropped = set[int]()
    for memory, casts in of_memory.items():
        places = {cast.place for cast in casts}
        if not _saves(memory, casts, [node for at, node in kept.items() if at not in places]):
            continue
        for cast in casts:
            kept[cast.place] = results[cast.place] = source = cast.source
            old = read.pop(cast.node.name)
            if source.name in read:
                dropped.add(cast.place)
                del kept[cast.place]
            else:
                with backward.inserting_before(old):
                    read[source.name] = backward.placeholder(source.name)
                read[source.name].meta = dict(source.meta)
            _make(backward, cast.steps, read, in_place_of=old)
    for place, node in checked.items():
        returned = node is kept.get(place) and node in results[:own_results]
        if returned and (steps := _steps(node, read)):
            dropped.add(place)
            del kept[place]
            _make(backward, steps, read, in_place_of=read.pop(node.name))
    changed = bool(dropped) or results[own_results:] != stored
    _return(forward, results, dropped)
    return changed


def _cast(place: int, kept: fx.Node) -> _Cast | None:
    """What a tensor was cast from, if that is a weight, or narrower than the tensor."""
    best, node, steps = None, kept, tuple[fx.Node, ...]()
    while (source := _source(node)) is not None:
        steps, is_cast = (node, *steps), ir.dtype(source) is not ir.dtype(node)
        node = source
        least = ir.dtype(best.source if best else kept).itemsize
        if ir.dtype(node).itemsize < least or (best and best.source is steps[0] and not is_cast):
            best = _Cast(place, kept, node, steps)
    is_cast = any(ir.dtype(step) is not ir.dtype(node) for step in steps)
    if WEIGHT in node.meta and is_cast:
        return _Cast(place, kept, node, steps)
    return best


def _source(node: fx.Node) -> fx.Node | None:
    """What the node is a cast or a view of, if that is all that it reads."""
    target = node.target
    if not isinstance(target, OpOverload) or len(node.all_input_nodes) != 1:
        return None
    cast = target is _CONVERT or (target is aten._to_copy.default and {*node.kwargs} == {"dtype"})
    alike = cast or target is aten._unsafe_view.default or target.is_view
    source = node.all_input_nodes[0]
    tensors = (ir.tensor(source), ir.tensor(node))
    dense = all(t is not None and t.layout is torch.strided for t in tensors)
    return source if alike and dense and source is node.args[0] else None


def _saves(memory: int | None, casts: list[_Cast], others: list[fx.Node]) -> bool:
    """Whether less is kept with what lies in this memory than with all that is cast from it."""
    elsewhere = set(map(ir.storage_now, others))
    source = casts[0].source
    freed = {ir.storage_now(cast.node): _bytes(cast.node) for cast in casts}
    cost = 0 if WEIGHT in source.meta or memory in elsewhere else _bytes(source)
    return sum(size for held, size in freed.items() if held not in elsewhere) > cost


def _steps(result: fx.Node, read: dict[str, fx.Node]) -> tuple[fx.Node, ...] | None:
    """The elementwise operators that make a result of what else the backward reads, in their order;
    None if others are needed, or many.
    """
    made = ir.reached([result], lambda n: [i for i in n.all_input_nodes if i.name not in read])
    steps = set(itertools.islice(made, _MOST + 1))
    if len(steps) > _MOST or not all(map(_is_elementwise, steps)):
        return None
    return tuple(node for node in result.graph.nodes if node in steps)


def _is_elementwise(node: fx.Node) -> bool:
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    pointwise = ir.is_pointwise(node) and bool(node.all_input_nodes) and not random
    return pointwise or _source(node) is not None


def _make(
    backward: fx.Graph,
    steps: tuple[fx.Node, ...],
    read: dict[str, fx.Node],
    *,
    in_place_of: fx.Node,
) -> None:
    """Make a tensor again before its first reader."""
    made = {node: read[node.name] for step in steps for node in step.all_input_nodes
            if node.name in read}  # fmt: skip
    users = in_place_of.users
    with backward.inserting_before(next(node for node in backward.nodes if node in users)):
        for step in steps:
            made[step] = backward.node_copy(step, made.__getitem__)
    in_place_of.replace_all_uses_with(made[steps[-1]])
    backward.erase_node(in_place_of)


def _return(forward: fx.Graph, results: list[Any], dropped: set[int]) -> None:
    """Return `results` but for those at `dropped`."""
    output = forward.output_node()
    places = [place for place in range(len(results)) if place not in dropped]
    output.args = (tuple(results[place] for place in places),)
    if "desc" in output.meta:  # AOTAutograd's, one for each
        output.meta["desc"] = [output.meta["desc"][place] for place in places]


def _bytes(node: fx.Node) -> int:
    """Of the whole memory that it lies in."""
    return ir.hint(ir.value(node).untyped_storage().nbytes())


# -- keep_written_inputs ---------------------------------------------------------------------------


def keep_written_inputs(forward: fx.Graph, backward: fx.Graph, own_results: int) -> bool:
    """Rewrite the forward; see the module."""
    output, writes = forward.output_node(), _writes(forward)
    results = list(output.args[0])  # type: ignore[arg-type]
    changed = False
    for index, node in enumerate(results[own_results:], own_results):
        if (write := writes.get(ir.storage_now(node))) is not None:
            with forward.inserting_before(write):
                results[index] = ir.new_call(forward, aten.clone.default, node)
            changed = True
    output.args = (tuple(results),)
    return changed


def _writes(forward: fx.Graph) -> dict[int | None, fx.Node]:
    """Memory that the forward writes -> the first write to it."""
    writes = forward.find_nodes(op="call_function", target=aten.copy_.default)
    known = {ir.storage_now(write.args[0]): write for write in reversed(writes)}
    known.pop(None, None)
    return known


# -- store_masks_as_bytes --------------------------------------------------------------------------


def store_masks_as_bytes(forward: fx.Graph, backward: fx.Graph, own_results: int) -> bool:
    """Rewrite both halves; see the module."""
    output = forward.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    own, kept = results[:own_results], results[own_results:]
    read = {str(n.target): n for n in backward.find_nodes(op="placeholder")}
    changed = False
    for index, node in enumerate(kept):
        placeholder = read.get(node.name) if isinstance(node, fx.Node) else None
        if placeholder is None or node in own or not _is_mask(node, placeholder):
            continue
        with forward.inserting_before(output):
            wide = ir.new_call(forward, _CONVERT, node, torch.float32)
            kept[index] = ir.new_call(forward, _CONVERT, wide, torch.uint8)
        _read_as_bytes(backward, placeholder)
        changed = True
    output.args = ((*own, *kept),)
    return changed


def _is_mask(node: fx.Node, placeholder: fx.Node) -> bool:
    """Whether fused kernels write these bools in the forward, and read them in the backward."""
    written, read = ir.tensor(node), ir.tensor(placeholder)
    return (
        written is not None
        and read is not None
        and written.dtype is read.dtype is torch.bool
        and written.shape == read.shape
        and is_supported(written.device)
        and capabilities(written.device).slow_bools
        and ir.is_pointwise(node)
        and all(ir.is_pointwise(user) or user.op == "output" for user in node.users)
        and all(map(ir.is_pointwise, placeholder.users))
    )


def _read_as_bytes(backward: fx.Graph, placeholder: fx.Node) -> None:
    users = list(placeholder.users)
    with ir.fake_mode(backward):
        placeholder.meta["val"] = placeholder.meta["val"].to(torch.uint8)
    placeholder.meta.pop("tensor_meta", None)
    with backward.inserting_before(ir.first_call(backward)):
        wide = ir.new_call(backward, _CONVERT, placeholder, torch.float32)
        mask = ir.new_call(backward, aten.ne.Scalar, wide, 0)
    placeholder.replace_all_uses_with(mask, users.__contains__)
