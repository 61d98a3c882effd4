"""Whether a step does to each parameter what it would do if the others weren't there.

Only then may some of them be left out of a step that was traced with all. It is proved for each
write of the traced graph: the new value follows from the parameter's own gradient and state, and
from numbers of its group. And a step may count in Python which parameters have a gradient, of which
a graph knows nothing; so a second graph, traced over some of them, must do the same to these.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

from torch import fx

from .. import ir
from ..errors import CannotRewrite
from ..ir.step import Slot

_OWN = ("param", "grad", "state")


class ParametersMix(CannotRewrite):
    """The step of one parameter depends on others."""


class _Value(NamedTuple):
    """How a value is computed, apart from whose it is; and the parameters that it depends on."""

    how: int
    whose: frozenset[int]


def refuse_mixed(graph: fx.Graph, some: fx.Graph, indices: Sequence[int]) -> None:
    """Check the graph of a step, before any pass.

    Args:
        some: the same step, traced over some of its parameters.
        indices: which: for each parameter of `some`, its index in `graph`.

    Raises:
        ParametersMix: what happens to a parameter depends on which others take part.
    """
    everything, part = _written(graph), _written(some)
    expected = {
        Slot(slot.kind, indices[slot.index], slot.key): value.how for slot, value in part.items()
    }
    found = {slot: v.how for slot, v in everything.items() if slot.index in set(indices)}
    if found != expected or any(
        value.whose - {slot.index} for slot, value in everything.items() if slot.kind in _OWN
    ):
        raise ParametersMix("what it does to a parameter depends on the others")


def _written(graph: fx.Graph) -> dict[Slot, _Value]:
    """What a step writes to each of its inputs."""
    known: dict[fx.Node, _Value | list[_Value]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            slot = ir.slot_of(node)
            own = slot.kind in _OWN
            name = (slot.kind, slot.key) if own else slot
            whose = frozenset((slot.index,)) if own else frozenset[int]()
            known[node] = _Value(hash((name, _layout(node))), whose)
        elif node.op == "call_function":
            known[node] = _computed(node, known)
    return {
        ir.slot_of(target): value
        for _, target, read in ir.writes(graph)
        if isinstance(value := known[read], _Value)
    }


def _layout(node: fx.Node) -> object:
    value = ir.tensor(node)
    return None if value is None else (value.dtype, tuple(value.shape), value.stride())


def _computed(node: fx.Node, known: dict[fx.Node, _Value | list[_Value]]) -> _Value | list[_Value]:
    if node.target is operator.getitem and isinstance(several := known[node.args[0]], list):  # type: ignore[index]
        return several[node.args[1]]  # type: ignore[index]
    arguments = [*node.args, *node.kwargs.values()]
    names = (str(node.target), *node.kwargs)
    if str(node.target).startswith("aten._foreach_"):  # each of a list from the same of other lists
        length = max(len(a) for a in arguments if isinstance(a, (list, tuple)))  # no node is one
        return [_joined(names, [_part(a, j, known) for a in arguments]) for j in range(length)]
    return _joined(names, [_whole(a, known) for a in arguments])


def _part(argument: object, j: int, known: dict[fx.Node, _Value | list[_Value]]) -> _Value:
    """Element `j` of an argument that is a list; all of another one."""
    if isinstance(argument, (list, tuple)):
        return _whole(argument[j], known)
    if isinstance(argument, fx.Node) and isinstance(several := known[argument], list):
        return several[j]
    return _whole(argument, known)


def _whole(argument: object, known: dict[fx.Node, _Value | list[_Value]]) -> _Value:
    if isinstance(argument, fx.Node):
        value = known[argument]
        return value if isinstance(value, _Value) else _joined((), value)
    if isinstance(argument, (list, tuple)):
        return _joined((), [_whole(a, known) for a in argument])
    return _Value(hash(repr(argument)), frozenset())


def _joined(names: Sequence[str], parts: Sequence[_Value]) -> _Value:
    how = hash((tuple(names), *(part.how for part in parts)))
    return _Value(how, frozenset[int]().union(*(part.whose for part in parts)))
