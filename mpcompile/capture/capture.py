"""Dynamo graph -> pre-dispatch ATen graph, ready for the passes.

Dynamo hands a backend torch functions, tensor methods and higher-order operators. We replay that
graph under `make_fx(pre_dispatch=True)`: one finite vocabulary of ATen operators, still above
autograd (AOTAutograd derives the backward from what we rewrite) and above the choice of an
attention kernel (the dtypes we place decide it).

What replaying would lose is kept by hand:

* A higher-order operator (autograd.Function, cond, flex_attention) stays one opaque node. Traced
  through, `autograd.Function` would silently lose its backward.
* So does a function that runs one unseen by Dynamo (`torch._dynamo.allow_in_graph`).
* A functorch transform (`torch.vmap`, `torch.func.grad`) keeps the nodes between its entry and its
  exit as Dynamo wrote them.
* The body of an activation checkpoint is inlined, its nodes tagged with their `Region`, so that the
  passes see one flat graph; the outline pass folds it back. A `nested_compile_region` is inlined.
* `set_grad_enabled` stays in the graph; every node records the mode it runs in (`"mp_grad"`).
* autocast regions leave the graph; every node records the innermost one (`"mp_autocast"`). One that
  is active around the whole call is ignored: the program is captured in FP32 all the same. Only an
  opaque node gets the region it stood in put back around it.

Torch internals used here were read in torch 2.13 and exist in 2.11.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    set_proxy_slot,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import CannotRewrite
from ..ir import Region, is_getitem, is_opaque, storage, written
from ..ir.fakes import fake_twin
from ..rules import PACKETS

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
INVOKE_SUBGRAPH = torch.ops.higher_order.invoke_subgraph
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
AUTOCAST = (ENTER_AUTOCAST, EXIT_AUTOCAST)
_METHODS = {"half": torch.float16, "bfloat16": torch.bfloat16}


def capture(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, planned_for: str | None = None
) -> fx.GraphModule:
    """Replay Dynamo's graph as pre-dispatch ATen.

    Args:
        gm: the graph Dynamo handed to the backend.
        example_inputs: its inputs: tensors and SymInts, one per placeholder.
        planned_for: the device type that the graph is planned for, whose autocast regions count
            even if the inputs lie elsewhere; None: where they lie.

    Returns:
        A graph with the same placeholders (names, sources, static marks) and outputs. Each node's
        `meta["val"]` and `meta["mp_captured"]` hold its FakeTensor in the FP32 program.

    Raises:
        CannotRewrite: the graph holds what can't be replayed faithfully; the argument says what.
    """
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        raise CannotRewrite("there is no tracing context: the graph does not come from Dynamo")
    for value in example_inputs:
        if is_traceable_wrapper_subclass(value):
            raise CannotRewrite(f"an input is a tensor subclass ({type(value).__name__})")

    fakes = [fake_twin(value, context) for value in example_inputs]
    place = _Place.of(example_inputs, planned_for)
    with (
        torch._C._DisableAutocast(),
        fx_traceback.preserve_node_meta(),
        context.fake_mode,
        _modes_kept(),
    ):
        traced = make_fx(
            lambda *args: tuple(_Replay(gm, place).run(*args)),
            pre_dispatch=True,
            tracing_mode="real",  # the inputs are fake already; symbols come with them
            _allow_non_fake_inputs=True,
        )(*fakes)
    _copy_provenance(gm, traced)
    for value, node in zip(example_inputs, traced.graph.find_nodes(op="placeholder"), strict=True):
        node.meta["mp_parameter"] = isinstance(value, torch.nn.Parameter)
        node.meta["mp_gradient"] = _source(node).endswith(".grad")
    _record_modes(traced.graph, place.devices)
    # Not eliminate_dead_code(): it goes through bodies too, where it misses `x.add_(y)`.
    for node in reversed(traced.graph.nodes):
        if not node.users and not _is_impure(node):
            traced.graph.erase_node(node)
    for node in traced.graph.nodes:
        node.meta["mp_captured"] = node.meta.get("val")
    traced.meta["mp_output_memory"] = _output_memory(traced)
    return traced


@contextlib.contextmanager
def _modes_kept() -> Iterator[None]:
    """Undo what a replay that fails half-way leaves behind: no_grad, and functorch forbidding hooks
    on saved tensors.
    """
    forbidden = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            yield
        finally:
            if forbidden is None:
                torch._C._autograd._saved_tensors_hooks_enable()
            else:
                torch._C._autograd._saved_tensors_hooks_disable(forbidden)


@dataclass(frozen=True)
class _Place:
    """Where the replay stands, bodies included.

    Attributes:
        devices: device types of the graph's inputs, and the one it is planned for; autocast regions
            of others don't matter.
        autocasts: (device type, dtype, enabled) of the regions around, outermost first.
        checkpoints: the activation checkpoints around, outermost first.
    """

    devices: frozenset[str]
    autocasts: list[tuple[str, torch.dtype | None, bool]]
    checkpoints: tuple[Region, ...] = ()

    @classmethod
    def of(cls, inputs: Sequence[Any], planned_for: str | None) -> _Place:
        types = {x.device.type for x in inputs if isinstance(x, torch.Tensor)}
        devices = frozenset(types | ({planned_for} if planned_for else set()))
        ambient: list[tuple[str, torch.dtype | None, bool]] = [
            (device, torch.get_autocast_dtype(device), True)
            for device in sorted(devices)
            if torch.is_autocast_enabled(device)
        ]
        return cls(devices, ambient)

    def autocast(self) -> tuple[str, torch.dtype | None] | None:
        """Device type and dtype of the autocast in force here."""
        relevant = [region for region in self.autocasts if region[0] in self.devices]
        device, dtype, enabled = relevant[-1] if relevant else ("", None, False)
        return (device, dtype) if enabled else None


class _Replay(fx.Interpreter):
    """Runs Dynamo's graph under the tracer; steps around higher-order operators."""

    def __init__(self, module: fx.GraphModule, place: _Place) -> None:
        super().__init__(module)
        self.place = place
        self.functorch_depth = 0
        self.current: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        if n.target is ENTER_AUTOCAST:
            device, dtype, enabled, _cache = n.args
            self.place.autocasts.append((str(device), dtype, bool(enabled)))  # type: ignore[arg-type]
        elif n.target is EXIT_AUTOCAST:
            self.place.autocasts.pop()
        if n.op in ("call_function", "call_method") and self._in_functorch(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return self._opaque(n.op, n.target, args, kwargs, "functorch")
        return super().run_node(n)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The node's arguments; under autocast its low dtype is FP32, as everywhere in the replay.

        There `x.to(h.dtype)` and `zeros(..., dtype=h.dtype)` name the dtype that autocast gave h,
        and Dynamo writes it down. (Not for `view`, which sees bits as another dtype, and not for
        operators that aren't torch's own.)
        """
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        autocast = self.place.autocast()
        if autocast is None or n.target in (*AUTOCAST, "view") or not _is_torchs(n):
            return args, kwargs
        replaced: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
            lambda a: torch.float32 if a is autocast[1] else a, (args, kwargs)
        )
        return replaced

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, torch.Tensor):
            # No input but the tensor itself: to replay a write to it would be to write to it.
            raise CannotRewrite(f"the program's own tensor {target} is an attribute of it")
        return value

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        autocast = self.place.autocast()
        if autocast is not None and _METHODS.get(target) is autocast[1]:
            target = "float"
        with _known_as_before((args, kwargs)):
            return super().call_method(target, args, kwargs)

    def _in_functorch(self, n: fx.Node) -> bool:
        """Whether the node belongs to a functorch transform, its entry and exit included."""
        name = getattr(n.target, "__name__", "")
        if name.endswith("_increment_nesting"):
            self.functorch_depth += 1
        elif name.endswith("_decrement_nesting"):
            self.functorch_depth -= 1
            return True
        return self.functorch_depth > 0 or getattr(n.target, "__module__", "").startswith(
            "torch._functorch"
        )

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is CHECKPOINT:
            return self._inline_checkpoint(args, kwargs)
        if target is INVOKE_SUBGRAPH:
            body, _identifier, *operands = args
            return _Replay(body, self.place).run(*operands)
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._opaque("call_function", target, args, kwargs)
        if target in PACKETS and self.place.autocast() is not None:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _widened, (args, kwargs))
        graph = _tracer().graph
        before, known = len(graph.nodes), _grad_fns((args, kwargs))
        with _known_as_before((args, kwargs)):
            result = super().call_function(target, args, kwargs)
        if _has_custom_backward(result, known):  # a function that the user put in the graph whole
            for node in reversed(list(itertools.islice(graph.nodes, before, None))):
                graph.erase_node(node)
            return self._opaque("call_function", target, args, kwargs)
        return result

    def _inline_checkpoint(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        body, *operands = args
        keys = ("_checkpoint_context_fn",)
        region = Region(dict(kwargs), {k: body.meta[k] for k in keys if k in body.meta})
        graph = _tracer().graph
        before = len(graph.nodes)
        inside = replace(self.place, checkpoints=(*self.place.checkpoints, region))
        out = _Replay(body, inside).run(*operands)
        for node in itertools.islice(graph.nodes, before, None):
            # an inner checkpoint has tagged its own nodes already
            node.meta.setdefault("mp_region", inside.checkpoints)
        return out

    def _opaque(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        what: str = "call",
    ) -> Any:
        """One node that calls the operator as Dynamo did; its result's shape is Dynamo's word.

        In an autocast region that means dtypes too: what comes out low goes on in FP32.
        """
        assert self.current is not None
        tracer = _tracer()
        autocast = self.place.autocast()
        if autocast is not None and what == "functorch":
            raise CannotRewrite("torch.vmap or torch.func.grad is used under autocast")
        for module in pytree.tree_leaves((args, kwargs)):
            if isinstance(module, fx.GraphModule):
                _register(tracer.root, module)
        example = self.current.meta.get("example_value")  # none: the call returns nothing
        with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
            result = pytree.tree_map(_fresh, example)
        proxy_args, proxy_kwargs = pytree.tree_map(tracer.unwrap_proxy, (args, kwargs))
        entered = autocast and _switch(ENTER_AUTOCAST, (*autocast, True, None))
        proxy = tracer.create_proxy(op, target, proxy_args, proxy_kwargs)
        proxy.node.meta["mp_opaque"] = what
        result = track_tensor_tree(result, proxy, constant=None, tracer=tracer)
        if autocast is None:
            return result
        _switch(EXIT_AUTOCAST, (entered,))
        dtype = autocast[1]
        return pytree.tree_map_only(
            torch.Tensor, lambda t: t.to(torch.float32) if t.dtype is dtype else t, result
        )


def _widened(value: torch.Tensor) -> torch.Tensor:
    """What an RNN takes under autocast, which would make its operands one dtype: here FP32.

    A state that an earlier call under autocast returned is low.
    """
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _is_torchs(node: fx.Node) -> bool:
    """Whether it calls a method, a function or an ATen operator of torch's own."""
    module = getattr(node.target, "__module__", None) or "torch"
    package = ".".join(module.split(".")[:3])
    custom = package.startswith("torch._ops.") and package != "torch._ops.aten"
    higher = isinstance(node.target, torch._ops.HigherOrderOperator)
    own = node.op == "call_method" or module.split(".")[0] in ("torch", "_operator")
    return node.op in ("call_function", "call_method") and own and not custom and not higher


def _switch(target: Any, args: tuple[Any, ...]) -> fx.Node:
    """A node that switches autocast around an opaque one; it is not the program's own."""
    node: fx.Node = _tracer().create_node("call_function", target, args, {})
    node.meta.update(mp_opaque="call", val=None)
    return node


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer


@contextlib.contextmanager
def _known_as_before(operands: Any) -> Iterator[None]:
    """An operator that gives back its operand (`broadcast_tensors`, `contiguous`) makes no new
    value, but the tracer knows the operand by the new node from then on. One made under no_grad
    would cut what comes after it from its history. (What is written in place is new.)
    """
    if torch.is_grad_enabled():
        yield
        return
    tracer = _tracer()
    tensors = [v for v in pytree.tree_leaves(operands) if isinstance(v, torch.Tensor)]
    before = [(tensor, get_proxy_slot(tensor, tracer, None)) for tensor in tensors]
    yield
    for tensor, known in before:
        now: Any = get_proxy_slot(tensor, tracer, None)
        if known is None or now is known:
            continue
        node = now.proxy.node
        while is_getitem(node):
            node = node.all_input_nodes[0]
        if not written(node):
            set_proxy_slot(tensor, tracer, known)


def _grad_fns(values: Any) -> set[Any]:
    """Where the tensors among the values stand in autograd's graph."""
    tensors = (v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor))
    return {t.grad_fn for t in tensors if t.grad_fn is not None}


def _has_custom_backward(result: Any, known: set[Any]) -> bool:
    """Whether autograd runs an autograd.Function of somebody's between `known` and the result.

    Its nodes in our graph would be its forward alone. (A custom operator's function is torch's own,
    and the operator itself stands in our graph.)
    """
    seen, queue = set(known), list(_grad_fns(result))
    while queue:
        grad_fn = queue.pop()
        if grad_fn is None or grad_fn in seen:
            continue
        seen.add(grad_fn)
        custom = isinstance(grad_fn, torch.autograd.function.BackwardCFunction)
        if custom and not grad_fn.name().startswith("GeneratedBackwardFor_"):
            return True
        queue += [parent for parent, _ in grad_fn.next_functions]
    return False


def _fresh(value: Any) -> Any:
    """A new tensor like one of Dynamo's, in the ambient fake mode, with its place in autograd."""
    if not isinstance(value, torch.Tensor):
        return value
    new = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    if not value.requires_grad:
        return new
    with torch.enable_grad():
        result = new.requires_grad_().clone()  # no leaf: the program may write to it
    return result if result.stride() == new.stride() else new


def _register(root: Any, module: fx.GraphModule) -> None:
    """Give a body a place on the traced module, so that the node can name it."""
    if any(module is known for known in root.modules()):
        return
    name = next(n for i in itertools.count() if not hasattr(root, n := f"body_{i}"))
    root.register_module(name, module)


def _copy_provenance(gm: fx.GraphModule, traced: fx.GraphModule) -> None:
    """Carry over what AOTAutograd reads from a graph of Dynamo's (static inputs, sources)."""
    traced.meta.update(gm.meta)
    theirs = gm.graph.find_nodes(op="placeholder")
    ours = traced.graph.find_nodes(op="placeholder")
    for old, new in zip(theirs, ours, strict=True):
        new._dynamo_source = getattr(old, "_dynamo_source", None)
        new._rename(_readable(_source(new), old.name))
        new.target = new.name
        for key in ("tensor_dict", "stack_trace", "nn_module_stack"):
            if key in old.meta:
                new.meta[key] = old.meta[key]
    traced.meta["mp_output_dtypes"] = _output_dtypes(gm)
    known = getattr(gm, "_param_name_to_source", {})
    names = [n for n, _ in (*traced.named_parameters(), *traced.named_buffers())]
    traced._param_name_to_source = {  # type: ignore[assignment]
        name: known.get(name, ConstantSource(f"mpcompile_{name}")) for name in names
    }


def _source(placeholder: fx.Node) -> str:
    """Where the program has an input from: `L['self']._modules['fc']._parameters['weight']`."""
    name = getattr(getattr(placeholder, "_dynamo_source", None), "name", "")
    return str(name() if callable(name) else name)  # a method in 2.11, a property in 2.13


def _readable(source: str, fallback: str) -> str:
    """`L['self']._modules['fc']._parameters['weight']` -> `fc_weight`; `L['x'][0]` -> `x_0`."""
    words = re.findall(r"[A-Za-z0-9_]+", source)
    words = [w for w in words if w not in ("_modules", "_parameters", "_buffers")]
    name = "_".join(words[2:] if "_parameters" in source or "_buffers" in source else words[1:])
    return name if name.isidentifier() else fallback


def _output_dtypes(gm: fx.GraphModule) -> list[torch.dtype | None]:
    """What the user's program returns: FP32, or what an autocast of the user's own made of it."""
    results = pytree.tree_leaves(gm.graph.output_node().args[0])
    examples = (r.meta.get("example_value") if isinstance(r, fx.Node) else None for r in results)
    return [e.dtype if isinstance(e, torch.Tensor) else None for e in examples]


def _record_modes(graph: fx.Graph, devices: frozenset[str]) -> None:
    """Write each node's grad mode and autocast region into its meta; drop the autocast nodes."""
    grad = True
    stack: list[tuple[bool, torch.dtype | None] | None] = [None]
    program = [n for n in graph.nodes if not is_opaque(n) or n.target not in AUTOCAST]
    for node in program:
        if node.target is torch._C._set_grad_enabled:
            grad = bool(node.args[0])
        elif node.target is ENTER_AUTOCAST:
            device, dtype, enabled, _cache = node.args
            stack.append((bool(enabled), dtype) if device in devices else stack[-1])
        elif node.target is EXIT_AUTOCAST:
            stack.pop()
        node.meta["mp_grad"] = grad
        node.meta["mp_autocast"] = stack[-1]
    for node in reversed(program):
        if node.target in AUTOCAST:
            graph.erase_node(node)


def _is_impure(node: fx.Node) -> bool:
    """What dead-code elimination must leave: writes, mode switches, opaque and random calls.

    A body may write to its operands, so a higher-order operator always stays. Batch norm in
    training writes its running statistics without its schema saying so, and is kept by its users.
    """
    if node.op in ("placeholder", "output"):
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable or node.is_impure()
    return node.op != "get_attr"


def _output_memory(traced: fx.GraphModule) -> list[int | None]:
    """For each result, the identity of its memory: equal for results that share it, and for the
    input that one shows.
    """
    results: list[Any] = list(traced.graph.output_node().args[0])  # type: ignore[arg-type]
    return [storage(result) if isinstance(result, fx.Node) else None for result in results]
