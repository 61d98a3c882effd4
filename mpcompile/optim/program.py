"""Regions of a step -> something to run: each kind compiled once, called with its tensors.

Torch internals used here were read in torch 2.13 and exist in 2.11.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
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
from ..ir.step import Slot
from .regions import Region, Split, is_held, signature

_ALWAYS = {
    # Muon iterates in BF16; a fused kernel would keep FP32 and find another orthogonal matrix.
    "emulate_precision_casts": True,
    "size_asserts": False,  # `Step` binds the tensors, and looks at them before each step
}

# As many norms as fit, as pointers, into the 4 KB of arguments that a kernel may always have.
_JOINED = 400
_MULTI_TENSOR = {
    # More than eight Inductor would stack in a kernel each; the second is not in torch 2.11.
    name: _JOINED
    for name in ("max_pointwise_cat_inputs", "max_complex_pointwise_cat_inputs")
    if hasattr(inductor, name)
}

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
    sized = [i for i, n in enumerate(region.inputs) if region.flat and ir.value(n).ndim]
    return _cached(region, emit, sized)


def _cached(region: Region, emit: Emit, sized: Sequence[int]) -> Callable[..., Any]:
    key = (emit, _is_small(region), *sized, *signature(region))
    with _compiling:
        if key not in _compiled:
            _compiled[key] = _inductor(region, emit, sized)
        return _compiled[key]


def _inductor(region: Region, emit: Emit, sized: Sequence[int]) -> Callable[..., Any]:
    """Compile a region whose inputs `sized` are vectors, of one size that may be any."""
    gm = fx.GraphModule(region.graph, region.graph.graph)
    _mark_static(gm, region)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    values = _values(mode, region, sized)
    threads = _ONE_THREAD if _is_small(region) else {}
    multi_tensor = capabilities(values[0].device).multi_tensor
    joined = _MULTI_TENSOR if multi_tensor and _joins_numbers(region) else {}
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
        # Its hits return the whole thing, and nothing would reach `compile_inner`.
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        compile_fx(gm, values, compile_inner, config_patches=patches)
    # What AOTAutograd wraps around it (views, aliases, gradients) does not occur here, and costs as
    # much as the call of a small kernel; so does what Inductor's own object looks up in each call.
    run = inner[-1].current_callable
    return lambda *arguments: run(list(arguments))


def _is_small(region: Region) -> bool:
    return max(ir.value(n).numel() for n in region.inputs) <= _FEW


def _joins_numbers(region: Region) -> bool:
    """Whether all that it concatenates is short: of long tensors, each element of the result would
    be looked for in all of them.
    """
    joins = [
        n for n in region.graph.graph.nodes if n.target in (aten.cat.default, aten.stack.default)
    ]
    return all(ir.value(n).numel() <= _JOINED for n in joins)


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


def _values(mode: FakeTensorMode, region: Region, sized: Sequence[int]) -> list[torch.Tensor]:
    """Fakes for the region's inputs, those at `sized` vectors of one symbolic size."""
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    vector = mode.from_tensor(
        torch.empty(_HINT, device="meta"), symbolic_context=context, source=ConstantSource("numel")
    )
    with mode:
        return [
            torch.empty(vector.shape, dtype=v.dtype, device=v.device)
            if i in sized
            else torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
            for i, v in enumerate(map(ir.value, region.inputs))
        ]


_Source = torch.Tensor | fx.Node  # a tensor that stays, or the name of one that comes anew


@dataclass
class _Call:
    """One region with its tensors."""

    run: Callable[..., Any]
    arguments: list[Any]  # tensors that stay; None for what comes anew in each step
    fresh: list[tuple[int, fx.Node, bool]]  # (position, the value, flattened)
    outputs: tuple[fx.Node, ...]

    def __call__(self, env: dict[fx.Node, torch.Tensor]) -> None:
        arguments = self.arguments.copy()
        for i, node, flattened in self.fresh:
            arguments[i] = _flatten(env[node]) if flattened else env[node]
        env.update(zip(self.outputs, self.run(*arguments), strict=True))


@dataclass
class _Batch:
    """Regions of one kind that only compute numbers: one call, on vectors of these numbers."""

    run: Callable[..., Any]
    arguments: list[_Source | list[_Source]]  # a list is stacked
    outputs: list[tuple[fx.Node, ...]]  # of each region

    def __call__(self, env: dict[fx.Node, torch.Tensor]) -> None:
        def tensor(source: _Source) -> torch.Tensor:
            return env[source] if isinstance(source, fx.Node) else source

        arguments = [
            torch.stack([tensor(s) for s in a]) if isinstance(a, list) else tensor(a)
            for a in self.arguments
        ]
        results = [result.unbind() for result in self.run(*arguments)]
        for nodes, values in zip(self.outputs, zip(*results, strict=True), strict=True):
            env.update(zip(nodes, values, strict=True))


class Program:
    """A compiled step, bound to its tensors.

    Args:
        pieces: the step.
        held: the tensors that are the same in every step, by slot; all others are given to `run`.
        emit: how to run them.

    Attributes:
        given: the inputs that `run` wants, by slot.
    """

    def __init__(self, pieces: Split, held: Mapping[Slot, torch.Tensor], emit: Emit) -> None:
        self.pieces = pieces
        self.emit = emit
        self.held = held
        self.calls: list[_Call | _Batch] = []
        for kind in _kinds(pieces.regions):
            batch = self._batch(kind) if len(kind) > 1 and emit.how == "inductor" else None
            self.calls += [batch] if batch is not None else map(self._call, kind)
        self.targets = [held[slot] for slot, _ in pieces.commits]
        self.values = [value for _, value in pieces.commits]
        self.given = {
            ir.slot_of(n): n
            for region in pieces.regions
            for n in region.inputs
            if n.op == "placeholder" and ir.slot_of(n) not in held
        }

    def _source(self, node: fx.Node) -> _Source:
        tensor = self.held.get(ir.slot_of(node)) if node.op == "placeholder" else None
        return node if tensor is None else tensor.detach()

    def _call(self, region: Region) -> _Call:
        arguments: list[Any] = []
        fresh: list[tuple[int, fx.Node, bool]] = []
        flat = region.flat and self.emit.how == "inductor"
        for i, node in enumerate(region.inputs):
            source = self._source(node)
            flattened = flat and ir.value(node).ndim > 0
            if isinstance(source, fx.Node):
                fresh.append((i, source, flattened))
                arguments.append(None)
            else:
                arguments.append(_flatten(source) if flattened else source)
        return _Call(compile_region(region, self.emit), arguments, fresh, region.outputs)

    def _batch(self, kind: Sequence[Region]) -> _Batch | None:
        columns = list(zip(*(region.inputs for region in kind), strict=True))
        differ = [i for i, column in enumerate(columns) if len(set(column)) > 1]
        if not kind[0].numbers or not differ or not _keeps_dtypes(kind[0], differ):
            return None
        arguments: list[_Source | list[_Source]] = [
            [self._source(n) for n in column] if i in differ else self._source(column[0])
            for i, column in enumerate(columns)
        ]
        run = _cached(kind[0], self.emit, differ)
        return _Batch(run, arguments, [region.outputs for region in kind])

    def run(self, env: dict[fx.Node, torch.Tensor]) -> None:
        """Do the step. `env`: the tensors of this step for the inputs in `given`; taken over."""
        with torch.no_grad(), torch._C._DisableAutocast():
            for call in self.calls:
                call(env)
            if self.targets:
                torch._foreach_copy_(self.targets, [env[v] for v in self.values])


def _kinds(regions: Sequence[Region]) -> list[list[Region]]:
    """The regions in their order, those that follow each other and only compute numbers together by
    kind. (They depend on nothing but what ran before them all.)
    """
    kinds: list[list[Region]] = []
    for numbers, run in itertools.groupby(regions, key=lambda region: region.numbers):
        if not numbers:
            kinds += [[region] for region in run]
            continue
        alike: dict[object, list[Region]] = {}
        for region in run:
            alike.setdefault(signature(region), []).append(region)
        kinds += alike.values()
    return kinds


def _keeps_dtypes(region: Region, sized: Sequence[int]) -> bool:
    """Whether all values keep their dtypes when some inputs are vectors: a vector's dtype counts
    for more than a number's.
    """

    class Compare(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            result = super().run_node(node)
            if isinstance(result, torch.Tensor) and result.dtype is not ir.dtype(node):
                raise TypeError(node.name)
            return result

    mode = FakeTensorMode(shape_env=ShapeEnv())
    try:
        with mode, torch.no_grad():
            Compare(region.graph).run(*_values(mode, region, sized))
    except TypeError:
        return False
    return True


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
