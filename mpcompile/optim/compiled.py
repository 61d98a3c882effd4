"""Compiles the graphs of a step to functions: once for each kind of graph.

A graph whose operators are all pointwise is compiled for vectors of any length, and called with its
tensors flattened: so one program serves parameters of all shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from .. import ir
from ..errors import CannotRewrite
from ..ir import aten
from ..ir.fakes import like
from ..ir.spec import AsPlanned
from ..ir.step_config import Slot
from ..lower.inference import Function, compile_inference, options_for_joins
from ..lower.write_order import inductor_for
from ..torch_inside.names import ConstantSource, FakeTensorMode
from ..verify.verdicts import Verify

_ALWAYS = {
    # Muon iterates in BF16; a fused kernel would keep FP32 and find another orthogonal matrix.
    "emulate_precision_casts": True,
    "size_asserts": False,  # `CompiledStep` checks its tensors before each step
}
_ONE_THREAD = {"cpp.threads": 1}
# For fewer elements than this, waking other threads costs more than the update.
SMALL = 1 << 14
# The size that the compiler assumes of flattened tensors; and of vectors of norms, one for each
# gradient. Sizes differ, so that nothing takes them for equal.
_HINT, _NORMS = 1 << 20, 1 << 8

# Operators that are pointwise, though torch doesn't tag them so.
_POINTWISE = (aten._to_copy.default, aten.clone.default, aten.copy_.default, aten.full_like.default,
              aten.zeros_like.default, aten.alias.default, aten.copy.default)  # fmt: skip

_compiled: dict[tuple[object, ...], Function] = {}


@dataclass(frozen=True)
class Emit:
    """How the graphs of a step run: "inductor" with its mode and options, or "eager", op by op; and
    how what Inductor compiles is verified; `strict`: raise where it compiled wrongly.
    """

    how: str = "inductor"
    mode: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    verify: bool | str = True
    strict: bool = False


@dataclass(frozen=True)
class Program:
    """A graph of a step as a function.

    Attributes:
        slots: its inputs.
        flat: for each input, whether the function takes it flattened.
        run: takes a list of the inputs, and writes to some of them.
    """

    slots: tuple[Slot, ...]
    flat: tuple[bool, ...]
    run: Function = field(compare=False)

    @classmethod
    def of(cls, gm: fx.GraphModule, emit: Emit, vectors: Collection[int] = ()) -> Program:
        """Compile a graph, or take what was compiled for one like it.

        Args:
            vectors: inputs (by number), numbers in the graph, that are to be vectors of one length:
                so it computes the numbers of several calls at once.
        """
        places = gm.graph.find_nodes(op="placeholder")
        slots = tuple(map(ir.slot_of, places))
        if emit.how != "inductor":
            return cls(slots, (False,) * len(slots), lambda arguments: gm.forward(*arguments))
        sizes = [0 if i in vectors else size for i, size in enumerate(_sizes(gm.graph))]
        key = (emit, _is_small(places), *_signature(gm.graph, sizes))
        if key not in _compiled:
            _compiled[key] = _by_inductor(gm, emit, sizes)
        return cls(slots, tuple(size == 0 for size in sizes), _compiled[key])


def serves_vectors(gm: fx.GraphModule, vectors: Collection[int]) -> bool:
    """Whether all values of a graph of numbers keep their dtypes where these inputs are vectors:
    the dtype of a vector wins over that of a number.
    """
    places = gm.graph.find_nodes(op="placeholder")
    mode = FakeTensorMode(shape_env=ShapeEnv())
    values = _values(mode, places, [0 if i in vectors else None for i in range(len(places))])
    try:
        with mode, torch.no_grad():
            AsPlanned(gm).run(*values)
    except CannotRewrite:
        return False
    return True


_Sizes = Sequence[int | None]
"""For each input, the number of the size that it has as a vector: 0 of all that are flattened; or
None, where its shape is its own.
"""


def _sizes(graph: fx.Graph) -> _Sizes:
    places = graph.find_nodes(op="placeholder")
    flat = _is_flat(graph)
    return [
        1 + ir.slot_of(n).index if ir.slot_of(n).kind == "norms"
        else 0 if flat and ir.value(n).ndim
        else None
        for n in places
    ]  # fmt: skip


def _is_flat(graph: fx.Graph) -> bool:
    """Whether every operator works element by element, on large tensors that lie alike."""
    large = [v for n in graph.find_nodes(op="placeholder") if (v := ir.value(n)).ndim > 0]
    # The stride of a dim of size 1 says nothing: a 1x1 convolution's gradient has another there.
    layouts = {
        (v.shape, tuple(v.stride(d) for d in range(v.ndim) if v.shape[d] > 1)) for v in large
    }
    if len(layouts) != 1 or large[0].numel() < 2 or not ir.is_dense(large[0]):
        return False
    shapes = ((), tuple(large[0].shape))
    return all(
        (value := ir.tensor(n)) is not None and is_pointwise(n) and tuple(value.shape) in shapes
        for n in graph.nodes
        if n.op == "call_function"
    )


def is_pointwise(node: fx.Node) -> bool:
    """Whether a node computes each element from the same elements of its inputs."""
    return ir.is_pointwise(node) or node.target in _POINTWISE


def numbers_of(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute 0-d tensors from 0-d inputs alone, such as bias corrections."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and node.target is not aten.copy_.default
            and all(n.op == "placeholder" or n in found for n in node.all_input_nodes)
            and all(map(_is_scalar, (node, *node.all_input_nodes)))
        ):
            found[node] = None
    return [*found]


def _is_scalar(node: fx.Node) -> bool:
    return all(value.ndim == 0 for value in ir.tensors_of(node.meta["val"]))


@dataclass(frozen=True)
class Cut:
    """A graph without the numbers in it. Inductor would compute each again for every few elements,
    and a `pow` for a bias correction then costs more time than the memory traffic can hide.

    Attributes:
        numbers: computes them, and writes them to its last inputs, or returns them.
        rest: takes them as its last inputs, and writes all that is written.
        written: numbers (by number) that are written, if `rest` doesn't, and to which inputs.
    """

    numbers: fx.GraphModule
    rest: fx.GraphModule
    written: Sequence[tuple[Slot, int]] = ()


def without_numbers(gm: fx.GraphModule, *, returned: bool = False) -> Cut | None:
    """Cut a graph in two; None: nothing in it but numbers takes one.

    Args:
        returned: the numbers are returned, and written elsewhere: for a device on which each write
            of one would be a kernel.
    """
    numbers = dict.fromkeys(numbers_of(gm.graph))
    rest = [n for n in gm.graph.nodes if n.op == "call_function" and n not in numbers]
    given = list(dict.fromkeys(i for n in rest for i in n.all_input_nodes if i in numbers))
    if not given:
        return None
    written = [w for w in ir.writes(gm.graph) if returned and w[2] in numbers]
    rest = [n for n in rest if n not in {write for write, *_ in written}]
    first, made = _part([*numbers], () if returned else given)
    places = ir.slots(first)
    for j, node in enumerate(() if returned else given):
        place = places[Slot("number", j)]
        first.call_function(aten.copy_.default, (place, made[node])).meta = dict(place.meta)
    first.output(tuple(made[n] for n in given) if returned else ())
    last, _ = _part(rest, given)
    last.output(())
    return Cut(
        fx.GraphModule(gm, first),
        fx.GraphModule(gm, last),
        [(ir.slot_of(target), given.index(value)) for _, target, value in written],
    )


def _part(
    nodes: Sequence[fx.Node], given: Sequence[fx.Node]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Some nodes as a graph that takes the numbers in `given`, too: see `ir.part`."""
    inputs = (i for n in nodes for i in n.all_input_nodes if i.op == "placeholder")
    numbers = {node: Slot("number", j) for j, node in enumerate(given)}
    return ir.part(nodes, {i: ir.slot_of(i) for i in inputs} | numbers)


def _is_small(places: Sequence[fx.Node]) -> bool:
    """Whether waking other threads would take longer than the graph does."""
    return max(ir.value(n).numel() for n in places) <= SMALL


def _signature(graph: fx.Graph, sizes: _Sizes) -> tuple[object, ...]:
    """A value that is equal for graphs that are the same program, apart from flattened sizes."""
    position = {node: f"%{i}" for i, node in enumerate(graph.nodes)}

    def of_input(node: fx.Node, size: int | None) -> tuple[object, ...]:
        value = ir.value(node)
        layout = (tuple(value.shape), value.stride()) if size is None else (size,)
        return (value.dtype, value.device, _is_held(node), *layout)

    return (
        *map(of_input, graph.find_nodes(op="placeholder"), sizes),
        *(
            (str(n.target), repr(fx.node.map_arg((n.args, n.kwargs), position.__getitem__)))
            for n in graph.nodes
            if n.op != "placeholder"
        ),
    )


def _is_held(node: fx.Node) -> bool:
    """Whether an input is the same tensor in every step."""
    slot = ir.slot_of(node)
    return slot.kind not in ("grad", "norm", "norms") and slot.key not in ("flag", "first")


# -- Inductor --------------------------------------------------------------------------------------


def _by_inductor(gm: fx.GraphModule, emit: Emit, sizes: _Sizes) -> Function:
    """Compile a graph; its inputs with a size are vectors of that symbolic size.

    Each size is an input as well, in front of the others: Inductor need not look for it in tensors,
    and does so no longer from torch 2.14 on.
    """
    firsts = {size: sizes.index(size) for size in sizes if size is not None}
    graph = fx.Graph()
    for size in firsts:
        graph.placeholder(f"numel{size}")
    graph.output(graph.graph_copy(gm.graph, {}))
    places = gm.graph.find_nodes(op="placeholder")
    mode = FakeTensorMode(shape_env=ShapeEnv())
    values = _values(mode, places, sizes)
    device = values[0].device
    threads = _ONE_THREAD if _is_small(places) else {}
    joined = options_for_joins(graph, device)
    options = {**_ALWAYS, **threads, **joined, **dict(emit.options)}
    own = zip(graph.find_nodes(op="placeholder")[len(firsts) :], places, strict=True)
    run = compile_inference(
        fx.GraphModule(gm, graph),
        [*(values[i].shape[0] for i in firsts.values()), *values],
        mode,
        static=[node for node, given in own if _is_held(given)],
        shares_memory=False,
        patches=inductor_for(emit.mode, options).config,
        verify=Verify(emit.verify, emit.strict),
    )
    if not firsts:
        return run

    def run_with_sizes(arguments: list[Any]) -> Sequence[Any]:
        arguments[:0] = [arguments[i].numel() for i in firsts.values()]
        return run(arguments)

    return run_with_sizes


def _values(mode: FakeTensorMode, places: Iterable[fx.Node], sizes: _Sizes) -> list[torch.Tensor]:
    """Fakes of the inputs; those with a size are vectors of that symbolic size."""
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    vectors = {
        size: mode.from_tensor(
            torch.empty(_NORMS + size if size else _HINT, device="meta"),
            symbolic_context=context,
            source=ConstantSource(f"numel{size}"),
        )
        for size in dict.fromkeys(sizes)
        if size is not None
    }
    with mode:
        return [
            like(v)
            if size is None
            else torch.empty(vectors[size].shape, dtype=v.dtype, device=v.device)
            for v, size in zip(map(ir.value, places), sizes, strict=True)
        ]
