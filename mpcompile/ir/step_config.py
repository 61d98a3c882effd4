"""The vocabulary of a generated optimizer step: its inputs (`Slot`), and its graph: which input is
which slot, what it writes, how it is traced.

A graph of a step has no outputs. Its inputs are the tensors it reads and writes, each named by a
`Slot`; its effect is the set of its `copy_` nodes. There are two kinds: one decides (whether to
skip, by what to clip, how the loss scale moves), the others update parameters.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from ..torch_inside.graphs import rename
from ..torch_inside.names import FakeTensor, autocast_off
from .edit import cut
from .marks import Role, added, set_mark
from .values import aten


@dataclass(frozen=True)
class Slot:
    """One input of the graph of a step.

    Attributes:
        kind: "param", "grad" or "copy", of the parameter `index` (where `CopyLayout.leads`, "param"
            is its master, and "copy" the parameter itself); "state", of the parameter `index` at
            `key`; "lr" or "setting", of the param group `index`; "norm", that of the gradient
            `index`, or "norms", a vector of those of one kind (`StepConfig.alike`); "scale", of the
            loss scale `index` at `key`; "number", a 0-d tensor that one graph leaves for another;
            "result", what the step reports at `key`; "factor", by which gradients are clipped.
        index: which parameter (in the order of the step), group or loss scale.
        key: which entry.
    """

    kind: str
    index: int = 0
    key: str = ""

    def __str__(self) -> str:
        number = "" if self.kind in ("result", "factor") else str(self.index)
        return "_".join(part for part in (self.kind + number, self.key) if part)


SKIPPED = Slot("result", key="skipped")  # 0-d bool: the step changes nothing
NORM = Slot("result", key="norm")  # 0-d FP32: of all gradients, before clipping
FACTOR = Slot("factor")  # 0-d, in the dtype of the norm


@dataclass(frozen=True)
class Gradient:
    """How the gradient of one parameter is stored when the step reads it.

    Attributes:
        dtype: of `p.grad`.
        scales: the loss scales (by index) of the graphs that make it.
        replicas: on how many of the ranks that agree each of its elements lies.
    """

    dtype: torch.dtype
    scales: tuple[int, ...] = ()
    replicas: int = 1


@dataclass(frozen=True)
class CopyLayout:
    """How a low copy of a master lies in memory.

    Attributes:
        dtype, strides: those of the copy; it may be a part of what is stored padded.
        leads: whether it is what the model and its users know, and may write: it is the parameter,
            and the optimizer alone knows the master.
    """

    dtype: torch.dtype
    strides: tuple[int, ...]
    leads: bool = False


# -- its graph -------------------------------------------------------------------------------------


def slots(graph: fx.Graph) -> dict[Slot, fx.Node]:
    """The inputs of a step's graph by slot."""
    return {node.meta["mp_slot"]: node for node in graph.find_nodes(op="placeholder")}


def set_slot(node: fx.Node, slot: Slot) -> None:
    """Set the slot of an input of a step's graph, and name the input after it."""
    node.meta["mp_slot"] = slot
    rename(node, str(slot))


def slot_of(node: fx.Node) -> Slot:
    """The slot of an input of a step's graph."""
    found: Slot = node.meta["mp_slot"]
    return found


def writes(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node, fx.Node]]:
    """What a step's graph writes: (the `copy_` node, the input it writes, the value)."""
    found = graph.find_nodes(op="call_function", target=aten.copy_.default)
    return [(node, *node.all_input_nodes) for node in found]


def part(
    nodes: Iterable[fx.Node], inputs: Mapping[fx.Node, Slot]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Some calls of a step's graph as a graph with these inputs: see `cut`."""
    graph, new = cut(nodes, inputs)
    for node, slot in zip(graph.find_nodes(op="placeholder"), inputs.values(), strict=True):
        node.meta = {"val": node.meta["val"]}
        set_slot(node, slot)
    return graph, new


def traced(
    function: Callable[[Mapping[Slot, torch.Tensor]], None], inputs: Mapping[Slot, torch.Tensor]
) -> fx.GraphModule:
    """The graph of a function that writes to some of these tensors, which are FakeTensors. An input
    that it doesn't need is none of the graph.
    """

    def run(*values: torch.Tensor) -> tuple[()]:
        function(dict(zip(inputs, values, strict=True)))
        return ()

    mode = next(v.fake_mode for v in inputs.values() if isinstance(v, FakeTensor))
    with mode, torch.no_grad(), autocast_off():
        gm: fx.GraphModule = make_fx(run)(*inputs.values())
    gm.graph.eliminate_dead_code()
    for node, slot in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        set_slot(node, slot)
        if not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


@contextlib.contextmanager
def because(why: str) -> Iterator[None]:
    """Give the calls that are traced in this context a reason."""
    mode = get_proxy_mode()
    assert mode is not None
    nodes = mode.tracer.graph.nodes
    last = next(iter(reversed(nodes)))
    yield
    for node in itertools.takewhile(lambda node: node is not last, reversed(nodes)):
        set_mark(node, added(Role.STEP, why))
