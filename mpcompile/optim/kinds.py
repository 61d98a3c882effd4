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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

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
    known: dict[fx.Node, _Value] = {}
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
            names = (str(node.target), *node.kwargs)
            arguments = (*node.args, *node.kwargs.values())
            known[node] = _joined(names, [_computed(a, known) for a in arguments])
    return {ir.slot_of(target): known[read] for _, target, read in ir.writes(graph)}


def _computed(argument: object, known: Mapping[fx.Node, _Value]) -> _Value:
    """An argument of a call; what is no node is told by its text."""
    if isinstance(argument, fx.Node):
        return known[argument]
    if isinstance(argument, (list, tuple)):
        return _joined((), [_computed(a, known) for a in argument])
    return _Value(hash(repr(argument)), frozenset())


def _joined(names: Sequence[str], parts: Sequence[_Value]) -> _Value:
    how = hash((tuple(names), *(part.how for part in parts)))
    return _Value(how, frozenset[int]().union(*(part.whose for part in parts)))
