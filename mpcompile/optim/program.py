"""Regions of a step -> something to run: each kind compiled once, called with its tensors.

Torch internals used here were read in torch 2.13 and exist in 2.11.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from .. import ir
from ..step import Slot
from .regions import Region, Split, is_held, signature

# Muon iterates in BF16; a fused kernel would keep FP32 and walk off to another orthogonal matrix.
_ROUND_AS_WRITTEN = {"emulate_precision_casts": True}

_HINT = 1 << 20  # elements of a flattened tensor, as far as the compiler is told

# Waking the other threads costs more than updating this many elements.
_FEW = 1 << 14
_ONE_THREAD = {"cpp.threads": 1}

_compiled: dict[tuple[object, ...], Callable[..., Any]] = {}
_compiling = threading.Lock()


@dataclass(frozen=True)
class Emit:
    """How the pieces are run: "inductor" with its mode and options, or "eager", op by op."""

    how: str = "inductor"
    mode: str | None = None
    options: tuple[tuple[str, Any], ...] = ()


def compile_region(region: Region, emit: Emit) -> Callable[..., Any]:
    """A function of the region's inputs; compiled once for all regions of its kind."""
    if emit.how != "inductor":
        return region.graph.forward
    key = (emit, _is_small(region), *signature(region))
    with _compiling:
        if key not in _compiled:
            _compiled[key] = _inductor(region, emit)
        return _compiled[key]


def _inductor(region: Region, emit: Emit) -> Callable[..., Any]:
    gm = fx.GraphModule(region.graph, region.graph.graph)
    _mark_static(gm, region)
    values = [ir.value(n) for n in region.inputs]
    mode = FakeTensorMode(shape_env=ShapeEnv())
    values = (_flat_values if region.flat else _same_values)(mode, values)
    threads = _ONE_THREAD if _is_small(region) else {}
    options = {**_ROUND_AS_WRITTEN, **threads, **dict(emit.options)}
    compiler = torch._TorchCompileInductorWrapper(emit.mode, options, None)
    with torch.no_grad(), torch._C._DisableAutocast(), tracing(TracingContext(mode)):
        return compiler(gm, values)  # type: ignore[no-any-return]


def _is_small(region: Region) -> bool:
    return max(ir.value(n).numel() for n in region.inputs) <= _FEW


def _mark_static(gm: fx.GraphModule, region: Region) -> None:
    """Tell CUDA graphs which inputs keep their address, in the form in which Dynamo tells it
    (`mark_static_address`): a graph that writes to any other input is not recorded.
    """
    gm.meta["dynamo_compile_id"] = None
    gm._param_name_to_source = {}  # type: ignore[assignment]
    for node, given in zip(gm.graph.find_nodes(op="placeholder"), region.inputs, strict=True):
        node._dynamo_source = None
        if is_held(given):
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


def _flat_values(mode: FakeTensorMode, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One-dimensional fakes of one symbolic size, for a program that covers every shape."""
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    # 2.11's StatelessSymbolicContext takes the same; the size is the only symbol.
    sized = mode.from_tensor(
        torch.empty(_HINT, device="meta"), symbolic_context=context, source=ConstantSource("numel")
    )
    with mode:
        return [
            torch.empty(sized.shape if v.ndim else (), dtype=v.dtype, device=v.device)
            for v in values
        ]


def _same_values(mode: FakeTensorMode, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with mode:
        return [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values
        ]


@dataclass
class _Call:
    run: Callable[..., Any]
    arguments: list[Any]  # tensors that stay; None for what comes anew in each step
    fresh: list[tuple[int, fx.Node, bool]]  # (position, the value, flattened)
    outputs: tuple[fx.Node, ...]


class Program:
    """A compiled step, bound to its tensors.

    Args:
        pieces: the step.
        held: the tensors that are the same in every step, by slot; all others are given to `run`.
        emit: how to run them.
    """

    def __init__(self, pieces: Split, held: Mapping[Slot, torch.Tensor], emit: Emit) -> None:
        self.pieces = pieces
        self.calls = [self._call(region, held, emit) for region in pieces.regions]
        self.targets = [held[slot] for slot, _ in pieces.commits]
        self.values = [value for _, value in pieces.commits]

    def _call(self, region: Region, held: Mapping[Slot, torch.Tensor], emit: Emit) -> _Call:
        arguments: list[Any] = []
        fresh: list[tuple[int, fx.Node, bool]] = []
        flat = region.flat and emit.how == "inductor"
        for i, node in enumerate(region.inputs):
            tensor = held.get(ir.slot_of(node)) if node.op == "placeholder" else None
            flattened = flat and ir.value(node).ndim > 0
            if tensor is None:
                fresh.append((i, node, flattened))
            else:
                tensor = tensor.detach()
                tensor = _flatten(tensor) if flattened else tensor
            arguments.append(tensor)
        return _Call(compile_region(region, emit), arguments, fresh, region.outputs)

    def run(self, given: Mapping[Slot, torch.Tensor]) -> None:
        """Do the step. `given`: the tensors of this step, gradients among them."""
        env: dict[fx.Node, torch.Tensor] = {}
        with torch.no_grad(), torch._C._DisableAutocast():
            for call in self.calls:
                arguments = call.arguments.copy()
                for i, node, flattened in call.fresh:
                    tensor = given[ir.slot_of(node)] if node.op == "placeholder" else env[node]
                    arguments[i] = _flatten(tensor) if flattened else tensor
                env.update(zip(call.outputs, call.run(*arguments), strict=True))
            if self.targets:
                torch._foreach_copy_(self.targets, [env[v] for v in self.values])


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
