"""Rewritten graph -> something to call: AOTAutograd with Inductor, AOTAutograd alone, or as it is.

Contract. Called inside a torch.compile backend, so a TracingContext is active. The graph is
pre-dispatch ATen with every cast explicit; its placeholders match the example inputs one to one and
carry what Dynamo wrote on its own (`_dynamo_source`, `meta["tensor_dict"]`), the graph module
Dynamo's `meta` and `_param_name_to_source`: with these AOTAutograd's and Inductor's caches work as
they do for a graph of Dynamo's. The function returned takes the inputs one by one and returns a
tuple. A graph just as Dynamo wrote it does too: what can't be captured is emitted unchanged.

* *Autocast*: none is active while the graph is traced, nor while it runs, whatever the caller has
  on: the graph says every dtype itself.
* *RNNs* run on the device's own kernel, outside of what is compiled (`islands.py`).

Torch internals used here were read in torch 2.13 and exist in 2.11.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.debugging import aot_eager, boxed_nop
from torch._functorch import config as functorch
from torch.utils.checkpoint import checkpoint

from .._version import __version__
from ..errors import CannotRewrite, MPCompileError
from ..ir.targets import CHECKPOINT
from .islands import Compiler, compile_around_rnns, has_rnn, name_rnns
from .joint import JointPass, with_joint_passes
from .second_backward import noticed


def emit(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    how: str,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    joint: Sequence[JointPass] = (),
    recompute: bool = False,
    untouched: bool = False,
    inner: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Compile a rewritten graph, forward and backward.

    Args:
        gm: the graph, see the module's contract. Taken over: don't use it afterwards.
        example_inputs: one per placeholder: tensors and SymInts.
        how: "inductor"; "aot_eager": AOTAutograd's forward and backward graphs, run op by op (its
            partitioner, no decompositions of Inductor's); "eager": the graph itself, op by op.
        mode: torch.compile's `mode`, for "inductor" only.
        options: Inductor options as torch.compile takes them, for "inductor" only; over `mode`.
        joint: passes for AOTAutograd's joint graph, for "inductor" only.
        recompute: see `_recomputing`, for "inductor" only.
        untouched: this is Dynamo's own graph, so the caller's autocast applies to it.
        inner: what stands in place of Inductor's code generation, for "inductor" only.

    Raises:
        CannotRewrite: an RNN stands where it can't be kept on the device's own kernel.
        RuntimeError: an unknown mode or option (Inductor's own message).
    """
    autocast = torch._C._is_any_autocast_enabled() and not untouched
    with torch._C._DisableAutocast() if autocast else contextlib.nullcontext():
        if how == "eager":
            _keep_random_state(gm)
            gm.recompile()
            run: Callable[..., Any] = gm.forward
        else:
            inductor = _inductor(mode, options, joint, inner) if how == "inductor" else None
            compile_graph = inductor or _aot_eager
            if recompute:
                compile_graph = _recomputing(compile_graph)
            salted = functools.partial(_salted, compile_graph)
            run = (_untouched if untouched else _rewritten)(gm, example_inputs, salted)
    # Dynamo guards on autocast: a function compiled without it will not be called within it.
    return _without_autocast(run) if autocast else run


def _keep_random_state(gm: fx.GraphModule) -> None:
    """Let a recomputed dropout drop the same elements.

    The operator leaves that to AOTAutograd's treatment of random numbers; run as it is, it draws
    anew (stock torch.compile(backend="eager") does too).
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=CHECKPOINT):
                node.target = _checkpoint
            module.recompile()


def _checkpoint(body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    if "_checkpoint_context_fn" in body.meta:
        kwargs["context_fn"] = body.meta["_checkpoint_context_fn"]
    return checkpoint(body, *args, **{**kwargs, "use_reentrant": False, "preserve_rng_state": True})


def _rewritten(
    gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compiler
) -> Callable[..., Any]:
    around = compile_around_rnns if has_rnn(gm) else _whole
    return noticed(around(gm, example_inputs, compile_graph))


def _untouched(
    gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compiler
) -> Callable[..., Any]:
    """Dynamo's graph: cut at its RNNs where that can be done, for it must be compiled anyhow.

    Under autocast an RNN may return another dtype than it was given, so what follows can't be
    compiled before it has run.
    """
    if not torch._C._is_any_autocast_enabled():
        name_rnns(gm)
        with contextlib.suppress(CannotRewrite):
            return _rewritten(gm, example_inputs, compile_graph)
    return _whole(gm, example_inputs, compile_graph)


def _whole(
    gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compiler
) -> Callable[..., Any]:
    return compile_graph(gm, example_inputs)


def _salted(
    compile_graph: Compiler, gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Compile; keep apart what different versions of mpcompile put into AOTAutograd's cache.

    The cache's key names our operators, but the entry holds what their implementations traced to.
    Attributes of the graph module are part of the key.
    """
    gm._mpcompile_version = __version__  # type: ignore[assignment]
    return compile_graph(gm, example_inputs)


def _inductor(
    mode: str | None,
    options: Mapping[str, Any] | None,
    joint: Sequence[JointPass],
    inner: Callable[..., Any] | None = None,
) -> Compiler:
    """What torch.compile itself makes of `mode` and `options` (mode first, options over it)."""
    whole = torch._TorchCompileInductorWrapper(mode, with_joint_passes(options, joint), None)
    if inner is None:
        return whole
    from torch._inductor.compile_fx import compile_fx  # takes a second to import

    compiler = functools.partial(compile_fx, inner_compile=inner, config_patches=whole.config)
    return functorch.patch(enable_autograd_cache=False)(compiler)  # type: ignore[no-any-return]


def check_inductor(mode: str | None, options: Mapping[str, Any] | None) -> None:
    """Ask torch.compile whether it knows `mode` and `options`, before anything is compiled.

    Raises:
        MPCompileError: it doesn't.
    """
    try:
        _inductor(mode, options, ())
    except (RuntimeError, TypeError, ValueError) as error:
        text = str(error).partition(", known options")[0]
        raise MPCompileError(f"mode={mode!r}, options={options!r}: {text}") from None


def _recomputing(compile_graph: Compiler) -> Compiler:
    """Let the backward compute again what a matrix product of its own reads.

    What a fused kernel can make of values stored anyway, the min-cut partitioner would rather
    compute again than store, except for what the backward must write out as a whole: the operands
    of products, such as GELU's result and a norm's. That exception is a setting of its own.
    """
    return functorch.patch(ban_recompute_materialized_backward=False)(compile_graph)  # type: ignore[no-any-return]


def _aot_eager(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    return aot_eager(gm, list(example_inputs), fw_compiler=_op_by_op, bw_compiler=_op_by_op)


def _op_by_op(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Runs a graph of AOTAutograd's, without autocast: `backward()` may be called within it.

    (Inductor's code calls no operator that autocast knows.)
    """
    run = _without_autocast(boxed_nop(gm, list(example_inputs)))
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch._C._DisableAutocast():
            return function(*args)

    return run
