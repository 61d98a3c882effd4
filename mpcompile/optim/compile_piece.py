"""Compiles a piece of a step to a function: once for each kind of piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from .. import ir
from ..errors import CannotRewrite
from ..ir.as_planned import AsPlanned
from ..ir.fakes import like
from ..lower.inference import Function, compile_inference, options_for_joins
from ..lower.write_order import inductor_for
from ..torch_inside.fakes import FakeTensorMode
from ..torch_inside.graphs import ConstantSource
from .pieces import Piece, is_held, signature

_ALWAYS = {
    # Muon iterates in BF16; a fused kernel would keep FP32 and find another orthogonal matrix.
    "emulate_precision_casts": True,
    "size_asserts": False,  # `CompiledStep` checks its tensors before each step
}

# The size of flattened tensors that the compiler assumes; of a further size, as many more elements.
_HINT, _FURTHER = 1 << 20, 1 << 10

_ONE_THREAD = {"cpp.threads": 1}

Sizes = tuple[int | None, ...]  # see `Piece.sizes`

_compiled: dict[tuple[object, ...], Function] = {}


@dataclass(frozen=True)
class Emit:
    """How the pieces run: "inductor" with its mode and options, or "eager", op by op."""

    how: str = "inductor"
    mode: str | None = None
    options: tuple[tuple[str, Any], ...] = ()


def compile_piece(piece: Piece, emit: Emit) -> Function:
    """The function of a piece's inputs; compiled once for all pieces of its kind."""
    if emit.how != "inductor" or piece.exchanges:
        return lambda arguments: piece.graph.forward(*arguments)
    return _cached(piece, emit, piece.sizes)


def compile_on_vectors(piece: Piece, emit: Emit, differing: Sequence[int]) -> Function | None:
    """A function that runs several pieces like this one, which computes scalars, at once.

    Args:
        piece: any of the pieces.
        emit: how they run; by Inductor.
        differing: the inputs (by index) that differ between the pieces. The function takes each of
            these as a vector with one element for each piece, and returns such vectors.

    Returns:
        None if that would change a dtype: a vector's dtype wins over that of a 0-d tensor.
    """
    sizes = tuple(0 if i in differing else None for i in range(len(piece.inputs)))
    return _cached(piece, emit, sizes) if _keeps_dtypes(piece, sizes) else None


def _cached(piece: Piece, emit: Emit, sizes: Sizes) -> Function:
    key = (emit, piece.is_small, sizes, *signature(piece))
    if key not in _compiled:
        _compiled[key] = _inductor(piece, emit, sizes)
    return _compiled[key]


def _inductor(piece: Piece, emit: Emit, sizes: Sizes) -> Function:
    """Compile a piece; its inputs with a size (`Piece.sizes`) are vectors of that symbolic size.

    Each size is an input as well, in front of the others: Inductor need not look for it in tensors,
    and does so no longer from torch 2.14 on.
    """
    firsts = {size: sizes.index(size) for size in sizes if size is not None}
    graph = fx.Graph()
    for size in firsts:
        graph.placeholder(f"numel{size}")
    graph.output(graph.graph_copy(piece.graph.graph, {}))
    gm = fx.GraphModule(piece.graph, graph)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    values = _values(mode, piece, sizes)
    numels = [values[i].shape[0] for i in firsts.values()]
    threads = _ONE_THREAD if piece.is_small else {}
    joined = options_for_joins(graph, values[0].device)
    options = {**_ALWAYS, **threads, **joined, **dict(emit.options)}
    patches = inductor_for(emit.mode, options).config
    inputs = zip(graph.find_nodes(op="placeholder")[len(firsts) :], piece.inputs, strict=True)
    static = [node for node, given in inputs if is_held(given)]
    run = compile_inference(
        gm, [*numels, *values], mode, static=static, shares_memory=False, patches=patches
    )
    if not firsts:
        return run

    def run_with_sizes(arguments: list[Any]) -> Sequence[Any]:
        arguments[:0] = [arguments[i].numel() for i in firsts.values()]
        return run(arguments)

    return run_with_sizes


def _values(mode: FakeTensorMode, piece: Piece, sizes: Sizes) -> list[torch.Tensor]:
    """Fakes of the piece's inputs; those with a size are vectors of that symbolic size."""
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    vectors = {
        # Sizes that differ, so that nothing takes them for equal.
        size: mode.from_tensor(
            torch.empty(_HINT + size * _FURTHER, device="meta"),
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
            for v, size in zip(map(ir.value, piece.inputs), sizes, strict=True)
        ]


def _keeps_dtypes(piece: Piece, sizes: Sizes) -> bool:
    """Whether all values keep their dtypes when the inputs with a size are vectors."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    try:
        with mode, torch.no_grad():
            AsPlanned(piece.graph).run(*_values(mode, piece, sizes))
    except CannotRewrite:
        return False
    return True
