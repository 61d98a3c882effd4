"""What a step does to each kind of parameter, found in the trace of a step over many.

Most optimizers do to each parameter what they would do if the others weren't there: what is written
to it and its state follows from its own gradient and state, and from numbers of its group. This is
proved for each write of the traced graph. Parameters to which the same is done, in the same shape,
are of one kind: a kind has one graph, and a parameter without a gradient is one that isn't called.

A step may also count in Python which parameters have a gradient, of which a graph knows nothing. So
before a kind serves for other parameters than those of its trace, a second trace, over some of
them, must do the same to these.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import fx

from .. import ir
from ..errors import CannotRewrite
from ..ir.step_config import Slot

_OWN = ("param", "grad", "state")


class ParametersMix(CannotRewrite):
    """The step of one parameter depends on others."""

    def __init__(self) -> None:
        super().__init__("what it does to a parameter depends on the others")


class _Value(NamedTuple):
    """How a value is computed, apart from whose it is; and the parameters that it depends on."""

    how: int
    whose: frozenset[int]


_Known = dict[fx.Node, Any]  # a `_Value` for each tensor, a list of them for each list


def kinds_of(graph: fx.Graph, count: int) -> list[int]:
    """For each of `count` parameters a number that is equal for those of one kind.

    Args:
        graph: of a traced step, before any pass.

    Raises:
        ParametersMix: what happens to a parameter depends on others.
    """
    written: list[dict[tuple[str, str], int]] = [{} for _ in range(count)]
    for slot, value in _written(graph).items():
        if slot.kind not in _OWN or value.whose - {slot.index}:
            raise ParametersMix
        written[slot.index][slot.kind, slot.key] = value.how
    return [hash(frozenset(one.items())) for one in written]


def graph_of_one(gm: fx.GraphModule, index: int) -> fx.GraphModule:
    """The step of one parameter, cut out of that of many; it is parameter 0 there."""
    slots = {node: slot for slot, node in ir.slots(gm.graph).items()}
    own = {n: s for n, s in slots.items() if s.kind in _OWN and s.index == index}
    wanted = ir.all_before(write for write, target, _ in ir.writes(gm.graph) if target in own)
    taken = {n: replace(s, index=0) if n in own else s for n, s in slots.items()
             if n in own or n in wanted}  # fmt: skip
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and n in wanted]
    graph, _ = ir.part(calls, taken)
    graph.output(())
    return fx.GraphModule(gm, graph)


def _written(graph: fx.Graph) -> Mapping[Slot, _Value]:
    """What a step writes to each of its inputs."""
    known: _Known = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            slot = ir.slot_of(node)
            own = slot.kind in _OWN
            name = (slot.kind, slot.key) if own else slot
            whose = frozenset((slot.index,)) if own else frozenset[int]()
            tensor = ir.tensor(node)
            layout = None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride())
            known[node] = _Value(hash((name, layout)), whose)
        elif node.op == "call_function":
            known[node] = _computed(node, known)
    return {ir.slot_of(target): known[read] for _, target, read in ir.writes(graph)}


def _computed(node: fx.Node, known: _Known) -> Any:
    if node.target is operator.getitem and isinstance(several := known[node.args[0]], list):  # type: ignore[index]
        return several[node.args[1]]  # type: ignore[index]
    arguments = [*node.args, *node.kwargs.values()]
    names = (str(node.target), *node.kwargs)
    if str(node.target).startswith("aten._foreach_"):  # each of a list from the same of other lists
        length = max(len(a) for a in arguments if isinstance(a, (list, tuple)))  # no node is one
        return [_joined(names, [_part(a, j, known) for a in arguments]) for j in range(length)]
    return _joined(names, [_whole(a, known) for a in arguments])


def _part(argument: object, j: int, known: _Known) -> _Value:
    """Element `j` of an argument that is a list; all of another one."""
    if isinstance(argument, (list, tuple)):
        return _whole(argument[j], known)
    if isinstance(argument, fx.Node) and isinstance(several := known[argument], list):
        one: _Value = several[j]
        return one
    return _whole(argument, known)


def _whole(argument: object, known: _Known) -> _Value:
    if isinstance(argument, fx.Node):
        value = known[argument]
        return value if isinstance(value, _Value) else _joined((), value)
    if isinstance(argument, (list, tuple)):
        return _joined((), [_whole(a, known) for a in argument])
    return _Value(hash(repr(argument)), frozenset())


def _joined(names: Sequence[str], parts: Sequence[_Value]) -> _Value:
    how = hash((tuple(names), *(part.how for part in parts)))
    return _Value(how, frozenset[int]().union(*(part.whose for part in parts)))
