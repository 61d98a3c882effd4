"""Compiles a piece of a step to a function: once for each kind of piece.

Torch internals used here were read in torch 2.13 and exist in 2.11.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from .. import ir
from ..devices.registry import capabilities
from ..ir import aten
from ..ir.fakes import like
from .pieces import Piece, is_held, signature

_ALWAYS = {
    # Muon iterates in BF16; a fused kernel would keep FP32 and find another orthogonal matrix.
    "emulate_precision_casts": True,
    "size_asserts": False,  # `CompiledStep` checks its tensors before each step
}

# The number of pointers to norms that fit into a kernel's arguments: 4 KB are always allowed.
_JOINED = 400
_MULTI_TENSOR = {
    # Inductor fuses at most eight inputs of a `cat` by default. The second name is not in 2.11.
    name: _JOINED
    for name in ("max_pointwise_cat_inputs", "max_complex_pointwise_cat_inputs")
    if hasattr(inductor, name)
}

_HINT = 1 << 20  # the size of flattened tensors that the compiler assumes

# For fewer elements than this, waking other threads costs more than the update.
SMALL = 1 << 14
_ONE_THREAD = {"cpp.threads": 1}

_compiled: dict[tuple[object, ...], Callable[..., Any]] = {}
_compiling = threading.Lock()


@dataclass(frozen=True)
class Emit:
    """How the pieces run: "inductor" with its mode and options, or "eager", op by op."""

    how: str = "inductor"
    mode: str | None = None
    options: tuple[tuple[str, Any], ...] = ()


def compile_piece(piece: Piece, emit: Emit) -> Callable[..., Any]:
    """The function of a piece's inputs; compiled once for all pieces of its kind."""
    if emit.how != "inductor" or piece.exchanges:
        return piece.graph.forward
    sized = [i for i, n in enumerate(piece.inputs) if piece.flat and ir.value(n).ndim]
    return _cached(piece, emit, sized)


def compile_on_vectors(
    piece: Piece, emit: Emit, differing: Sequence[int]
) -> Callable[..., Any] | None:
    """A function that runs several pieces like this one, which computes scalars, at once.

    Args:
        piece: any of the pieces.
        emit: how they run; by Inductor.
        differing: the inputs (by index) that differ between the pieces. The function takes each of
            these as a vector with one element for each piece, and returns such vectors.

    Returns:
        None if that would change a dtype: a vector's dtype wins over that of a 0-d tensor.
    """
    return _cached(piece, emit, differing) if _keeps_dtypes(piece, differing) else None


def _cached(piece: Piece, emit: Emit, sized: Sequence[int]) -> Callable[..., Any]:
    key = (emit, _is_small(piece), *sized, *signature(piece))
    with _compiling:
        if key not in _compiled:
            _compiled[key] = _inductor(piece, emit, sized)
        return _compiled[key]


def _inductor(piece: Piece, emit: Emit, sized: Sequence[int]) -> Callable[..., Any]:
    """Compile a piece whose inputs `sized` are vectors of one symbolic size."""
    gm = fx.GraphModule(piece.graph, piece.graph.graph)
    _mark_static(gm, piece)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    values = _values(mode, piece, sized)
    threads = _ONE_THREAD if _is_small(piece) else {}
    multi_tensor = capabilities(values[0].device).multi_tensor
    joined = _MULTI_TENSOR if multi_tensor and _joins_short(piece) else {}
    options = {**_ALWAYS, **threads, **joined, **dict(emit.options)}
    patches = torch._TorchCompileInductorWrapper(emit.mode, options, None).config
    inner: list[Any] = []

    def compile_inner(*args: Any, **kwargs: Any) -> Any:
        inner.append(compile_fx_inner(*args, **kwargs))
        return inner[-1]

    with (
        torch.no_grad(),
        torch._C._DisableAutocast(),
        tracing(TracingContext(mode)),
        # A cache hit would return the whole function without a call of `compile_inner`.
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        compile_fx(gm, values, compile_inner, config_patches=patches)
    # AOTAutograd's wrapper (for views, aliases, gradients) isn't needed here, and costs as much as
    # the call of a small kernel; so do the look-ups of Inductor's own object in each call.
    run = inner[-1].current_callable
    return lambda *arguments: run(list(arguments))


def _is_small(piece: Piece) -> bool:
    return max(ir.value(n).numel() for n in piece.inputs) <= SMALL


def _joins_short(piece: Piece) -> bool:
    """Whether all its `cat` and `stack` calls have short results: for each element of the result, a
    fused kernel searches all inputs for it.
    """
    joins = [
        n for n in piece.graph.graph.nodes if n.target in (aten.cat.default, aten.stack.default)
    ]
    return all(ir.value(n).numel() <= _JOINED for n in joins)


def _mark_static(gm: fx.GraphModule, piece: Piece) -> None:
    """Tell CUDA graphs which inputs keep their address, in Dynamo's form (`mark_static_address`):
    CUDA graphs don't record a graph that writes to any other input.
    """
    gm.meta["dynamo_compile_id"] = None
    gm._param_name_to_source = {}  # type: ignore[assignment]
    for node, given in zip(gm.graph.find_nodes(op="placeholder"), piece.inputs, strict=True):
        node._dynamo_source = None
        if is_held(given):
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


def _values(mode: FakeTensorMode, piece: Piece, sized: Sequence[int]) -> list[torch.Tensor]:
    """Fakes of the piece's inputs; those at `sized` are vectors of one symbolic size."""
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    vector = mode.from_tensor(
        torch.empty(_HINT, device="meta"), symbolic_context=context, source=ConstantSource("numel")
    )
    with mode:
        return [
            torch.empty(vector.shape, dtype=v.dtype, device=v.device) if i in sized else like(v)
            for i, v in enumerate(map(ir.value, piece.inputs))
        ]


def _keeps_dtypes(piece: Piece, sized: Sequence[int]) -> bool:
    """Whether all values keep their dtypes when the inputs `sized` are vectors."""

    class Compare(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            result = super().run_node(node)
            if isinstance(result, torch.Tensor) and result.dtype is not ir.dtype(node):
                raise TypeError(node.name)
            return result

    mode = FakeTensorMode(shape_env=ShapeEnv())
    try:
        with mode, torch.no_grad():
            Compare(piece.graph).run(*_values(mode, piece, sized))
    except TypeError:
        return False
    return True
