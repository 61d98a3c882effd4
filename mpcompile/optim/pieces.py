"""The graph of a step -> the pieces that are compiled, and run one after another.

    measure    a norm for each gradient; reads nothing else
    collect    0-d tensors: what this rank tells the others, where ranks share the parameters
    agree      the sum of that over all ranks; runs operator by operator
    prepare    0-d tensors: skip or not, the clipping factor, the loss scale
    scalars    0-d tensors that follow from the state: bias corrections, step counters
    update     everything that touches a parameter or its moments
    commit     stores the 0-d results: counters, the scale, what the step reports

They are compiled apart because fusion would make them slower: a bias correction inlined into the
update would be computed again for every few elements, and a `pow` then costs more time than the
memory traffic can hide.

On CPU the pieces are split further, into connected parts: mostly one for each parameter. They are
alike, so each kind is compiled once and called for each parameter; a kind whose operators are all
pointwise covers every shape. So a step of any size compiles in seconds. Small ones are then joined
again, some at a time (`join_pieces.py`). On CUDA, where a launch costs more than a small update,
the pieces stay whole and Inductor fuses them horizontally.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx
import torch
from torch import fx

from .. import ir
from ..ir import aten
from ..ir.step import Slot
from ..torch_inside.ops import OpOverload

MEASURE, COLLECT, AGREE, PREPARE, SCALARS, UPDATE, COMMIT = range(7)
# For fewer elements than this, waking other threads costs more than the update.
SMALL = 1 << 14
# Norms of no more elements than this, all together, take less time than their calls.
_FAST = 1 << 17
# What a function can do at once for so many parameters compiles fast.
FEW = 8
_MEASURES = (aten.linalg_vector_norm.default, aten._foreach_norm.Scalar)
# Operators that are pointwise, though torch doesn't tag them so.
_POINTWISE = (aten._to_copy.default, aten.clone.default, aten.copy_.default, aten.full_like.default,
              aten.zeros_like.default, aten.alias.default, aten.copy.default)  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """Operators of a step that are compiled together.

    Attributes:
        graph: its own graph module; it returns a tuple.
        inputs: the nodes of the step's graph that are its inputs.
        outputs: the nodes that it returns.
        sizes: for each input, the number of the size that it has when it is flattened, or None: it
            must not be flattened. Inputs with one number have one shape and layout, which no
            operator depends on.
        exchanges: it exchanges numbers with other processes; it isn't compiled.
        scalars: it computes 0-d tensors from 0-d tensors, pointwise: pieces of one kind may run at
            once, on vectors of these.
        results: the last of its inputs, to which it writes the values of these nodes.
        fast: waking other threads would take longer than it does.
    """

    graph: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    sizes: tuple[int | None, ...]
    exchanges: bool = False
    scalars: bool = False
    results: tuple[fx.Node, ...] = ()
    fast: bool = False

    @property
    def flat(self) -> bool:
        """Whether it may be called with its tensors flattened."""
        return any(size is not None for size in self.sizes)

    @property
    def is_small(self) -> bool:
        """Whether calling it may cost as much as what it computes."""
        return self.fast or max(ir.value(n).numel() for n in self.inputs) <= SMALL


@dataclass(frozen=True)
class Split:
    """A step in pieces: the pieces in the order they run, then the 0-d writes."""

    pieces: tuple[Piece, ...]
    commits: tuple[tuple[Slot, fx.Node], ...]


def split(gm: fx.GraphModule, *, whole: bool, together: bool = False) -> Split:
    """Cut the graph of a step into pieces.

    Args:
        whole: into as few as their order allows.
        together: all that comes before the update into as few as their order allows.
    """
    stages = stages_of(gm)
    commits = [n for n, stage in stages.items() if stage == COMMIT]
    pieces: list[Piece] = []
    for group in _groups(gm, stages, together=whole or together):
        nodes = [n for n, stage in stages.items() if stage in group]
        in_parts = not whole and group in ((MEASURE,), (SCALARS,), (UPDATE,))
        parts = _connected(nodes) if in_parts else [nodes]
        for part in filter(None, parts):
            piece = _piece(gm, part, exchanges=group == (AGREE,))
            pieces.append(replace(piece, fast=group == (MEASURE, PREPARE)))
    return Split(
        tuple(pieces),
        tuple((ir.slot_of(n.args[0]), n.args[1]) for n in commits),  # type: ignore[arg-type, misc]
    )


def _groups(
    gm: fx.GraphModule, stages: Mapping[fx.Node, int], *, together: bool
) -> Sequence[tuple[int, ...]]:
    """The stages that are cut into pieces together, in order."""
    if AGREE in stages.values():
        if together:
            return [(MEASURE, COLLECT), (AGREE,), (PREPARE, SCALARS), (UPDATE,)]
        return [(stage,) for stage in range(COMMIT)]
    if together:
        return [(MEASURE, PREPARE, SCALARS), (UPDATE,)]
    if _measures_fast(gm):
        return [(MEASURE, PREPARE), (SCALARS,), (UPDATE,)]
    return [(MEASURE,), (PREPARE,), (SCALARS,), (UPDATE,)]


def _measures_fast(gm: fx.GraphModule) -> bool:
    """Whether calls for the norms would take longer than the norms, and these are so few that one
    function of them all compiles as fast as one for each kind.
    """
    norms = dict.fromkeys(ir.step_notes(gm).norms)
    measured = [ir.value(i) for n in norms for i in n.all_input_nodes]
    return len(measured) <= FEW and sum(v.numel() for v in measured) <= _FAST


def stages_of(gm: fx.GraphModule) -> dict[fx.Node, int]:
    notes = ir.step_notes(gm)
    measures, agreement = set(notes.norms), set(notes.agreement)
    collected = ir.all_before(agreement)
    stages: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        inputs = node.all_input_nodes
        kinds = [ir.slot_of(n) for n in inputs if n.op == "placeholder"]
        below = max((stages[n] for n in inputs if n in stages), default=PREPARE)
        if node in measures or (node.target in _MEASURES and measures & node.users.keys()):
            stages[node] = MEASURE
        elif node in agreement:
            stages[node] = AGREE
        elif node in collected:
            stages[node] = COLLECT
        elif _is_commit(node):
            stages[node] = COMMIT
        elif (
            below == UPDATE
            or any(_is_large(n) for n in inputs if n.op == "placeholder")
            or (not inputs and ir.value(node).ndim > 0)
        ):
            stages[node] = UPDATE
        elif below == SCALARS or any(slot.kind in ("state", "absent") for slot in kinds):
            stages[node] = SCALARS
        else:
            stages[node] = PREPARE
    return stages


def _is_commit(node: fx.Node) -> bool:
    """Whether the node is a 0-d write, of a counter or a result. It is done at the very end, after
    every read of the old value.
    """
    target = node.args[0] if node.target is aten.copy_.default else None
    return (
        isinstance(target, fx.Node)
        and ir.value(target).ndim == 0
        and ir.slot_of(target).kind not in ("param", "copy")
    )


def _is_large(node: fx.Node) -> bool:
    return ir.slot_of(node).kind in ("param", "grad", "copy") or ir.value(node).ndim > 0


def _connected(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Groups of the nodes that share no value, and no input that one of them writes."""
    members = set(nodes)
    written = {n.args[0] for n in nodes if n.target is aten.copy_.default}
    links: nx.Graph[fx.Node] = nx.Graph()
    links.add_nodes_from(nodes)
    for node in nodes:
        links.add_edges_from(
            (node, n) for n in node.all_input_nodes if n in members or n in written
        )
    order = {node: i for i, node in enumerate(nodes)}
    groups = [sorted(g & members, key=order.__getitem__) for g in nx.connected_components(links)]
    return sorted(groups, key=lambda group: order[group[0]])


def _piece(gm: fx.GraphModule, nodes: Sequence[fx.Node], *, exchanges: bool) -> Piece:
    members = set(nodes)
    inputs = tuple(dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in members))
    outputs = tuple(n for n in nodes if any(u not in members for u in n.users))
    scalars = not exchanges and all(is_pointwise(n) and ir.value(n).ndim == 0 for n in nodes)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(inputs):
        env[node] = graph.placeholder(f"x{i}")
        env[node].meta["val"] = node.meta["val"]
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        env[node].meta = {"val": node.meta["val"]}
    graph.output(tuple(env[n] for n in outputs))
    flat = not exchanges and _is_flat(nodes, inputs)
    sizes = tuple(0 if flat and ir.value(n).ndim else None for n in inputs)
    return Piece(fx.GraphModule(gm, graph), inputs, outputs, sizes, exchanges, scalars)


def _is_flat(nodes: Iterable[fx.Node], inputs: Iterable[fx.Node]) -> bool:
    large = [v for n in inputs if (v := ir.value(n)).ndim > 0]
    # The stride of a dim of size 1 says nothing: a 1x1 convolution's gradient has another there.
    layouts = {
        (v.shape, tuple(v.stride(d) for d in range(v.ndim) if v.shape[d] > 1)) for v in large
    }
    if len(layouts) != 1 or large[0].numel() < 2 or not _is_dense(large[0]):
        return False
    for node in nodes:
        if not isinstance(node.target, OpOverload):
            return False
        if _reduces_all(node):
            continue
        value = ir.tensor(node)
        if value is None:  # a multi-tensor operator
            return False
        shape = tuple(value.shape)
        if not is_pointwise(node) or shape not in ((), tuple(large[0].shape)):
            return False
    return True


def is_pointwise(node: fx.Node) -> bool:
    """Whether a node computes each element from the same elements of its inputs."""
    return isinstance(node.target, OpOverload) and (
        torch.Tag.pointwise in node.target.tags or node.target in _POINTWISE
    )


def _reduces_all(node: fx.Node) -> bool:
    return node.target is aten.linalg_vector_norm.default and ir.value(node).ndim == 0


def _is_dense(value: torch.Tensor) -> bool:
    dense: bool = torch.ops.aten.is_non_overlapping_and_dense.default(value)
    return dense


def is_held(node: fx.Node) -> bool:
    """Whether a piece's input is the same tensor in every step: not a gradient, not a result of
    another piece, not a tensor that the loss scale makes for each step.
    """
    if node.op != "placeholder":
        return False
    slot = ir.slot_of(node)
    return slot.kind != "grad" and (slot.kind, slot.key) not in _FRESH


_FRESH = (("scale", "flag"), ("scale", "first"))


def signature(piece: Piece) -> tuple[object, ...]:
    """A value that is equal for pieces that are the same program, apart from flattened sizes."""
    position = {node: i for i, node in enumerate(piece.graph.graph.nodes)}

    def plain(argument: object) -> object:
        if isinstance(argument, fx.Node):
            return f"%{position[argument]}"
        if isinstance(argument, (list, tuple)):
            return tuple(plain(a) for a in argument)
        return repr(argument)

    def of_input(node: fx.Node, size: int | None) -> tuple[object, ...]:
        value = ir.value(node)
        layout = (tuple(value.shape), value.stride()) if size is None else (size,)
        return (value.dtype, value.device, is_held(node), *layout)

    return (
        *map(of_input, piece.inputs, piece.sizes),
        *(
            (str(n.target), plain(n.args), tuple((k, plain(v)) for k, v in n.kwargs.items()))
            for n in piece.graph.graph.nodes
            if n.op != "placeholder"
        ),
    )
