"""Rewritten graph -> function: by AOTAutograd with Inductor, by AOTAutograd alone, or unchanged.

Contract. `emit` is called inside a torch.compile backend, so a TracingContext is active. The graph
is pre-dispatch ATen with every cast explicit. Its placeholders match the example inputs one to one
and keep Dynamo's notes (`_dynamo_source`, `meta["tensor_dict"]`); the graph module keeps Dynamo's
`meta` and `_param_name_to_source`. With these, AOTAutograd's and Inductor's caches work as for a
graph of Dynamo's. The function returned takes the inputs one by one and returns a tuple. `emit`
also takes a graph as Dynamo wrote it: one that can't be captured is emitted unchanged.

* *Autocast* is off while the graph is traced and while it runs, even if the caller has it on: the
  graph itself states every dtype.
* *RNNs* run on the device's own kernel, outside of the compiled pieces (`islands.py`).
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx
from torch.utils.checkpoint import checkpoint

from .._version import __version__
from ..errors import CannotRewrite, MPCompileError, did_you_mean
from ..ir.second_backward import noticed
from ..ir.targets import CHECKPOINT
from ..passes.joint.kept_for_backward import keep_sources, keep_written_inputs
from ..rules import PACKETS
from ..torch_inside import names
from ..torch_inside.graphs import CHECKPOINT_CONTEXT
from ..torch_inside.inductor import boxed, check_how
from ..torch_inside.names import autocast_is_on, autocast_off, compile_fx
from ..torch_inside.private_names import Part, why_off
from ..verify.first_call import compile_verified
from ..verify.verdicts import Verify
from .islands import Compiler, compile_around_rnns, gains, has_rnn, is_apart, name_rnns
from .joint import NO_PASSES, JointPasses, Partitioner, with_joint_passes
from .write_order import inductor_for

_KEPT = (keep_sources, keep_written_inputs)


def emit(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    how: str,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    joint: JointPasses = NO_PASSES,
    untouched: bool = False,
    sparing: bool = False,
    inner: Callable[..., Any] | None = None,
    verify: Verify | None = None,
) -> Callable[..., Any]:
    """Compile a rewritten graph, forward and backward.

    Args:
        gm: the graph, see the module's contract. It may be changed: don't use it afterwards.
        example_inputs: one for each placeholder: tensors and SymInts.
        how: "inductor"; "aot_eager": AOTAutograd's forward and backward graphs, run op by op (with
            its partitioner, without Inductor's decompositions); "eager": the graph, op by op.
        mode: torch.compile's `mode`, for "inductor" only.
        options: Inductor options as torch.compile takes them, for "inductor" only; beat `mode`.
        joint: passes for AOTAutograd's joint graph and its two halves, for "inductor" only.
        untouched: this is Dynamo's own graph, so the caller's autocast applies to it.
        sparing: of the pieces around RNNs, run those op by op that don't gain by being compiled.
        inner: used in place of Inductor's code generation, for "inductor" only.
        verify: how what Inductor compiles is verified; None: not at all.

    Raises:
        CannotRewrite: an RNN stands where it can't be kept on the device's own kernel.
        MPCompileError: see `check_how`.
        RuntimeError: an unknown mode or option (Inductor's own message).
    """
    check_how(how)
    autocast = autocast_is_on() and not untouched
    with autocast_off() if autocast else contextlib.nullcontext():
        if how == "eager":
            run: Callable[..., Any] = _as_it_is(gm)
        else:
            compile_graph: Compiler = _aot_eager
            if how == "inductor":
                compile_graph = _inductor(mode, options, joint, inner, verify)
            compiler = functools.partial(_compiled, compile_graph)
            around = _untouched if untouched else _rewritten
            run = (_sparing if sparing else around)(gm, example_inputs, compiler)
    # Dynamo guards on autocast: a function compiled without it will not be called within it.
    return _without_autocast(run) if autocast else run


def _as_it_is(gm: fx.GraphModule) -> Callable[..., Any]:
    """The graph, to be run op by op. A recomputed dropout drops the same elements.

    The checkpoint operator relies on AOTAutograd's handling of random numbers. Run op by op, it
    draws new ones (as does stock torch.compile(backend="eager")).
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=CHECKPOINT):
                node.target = _checkpoint
            module.recompile()
    return gm.forward


def _checkpoint(body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    if CHECKPOINT_CONTEXT in body.meta:
        kwargs["context_fn"] = body.meta[CHECKPOINT_CONTEXT]
    return checkpoint(body, *args, **{**kwargs, "use_reentrant": False, "preserve_rng_state": True})


def _rewritten(
    gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compiler
) -> Callable[..., Any]:
    if has_rnn(gm):
        return noticed(compile_around_rnns(gm, example_inputs, compile_graph))
    return noticed(compile_graph(gm, example_inputs))


def _sparing(
    gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compiler
) -> Callable[..., Any]:
    """Compile what gains by it around the RNNs of a rewritten graph."""

    def compile_piece(piece: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph(piece, inputs) if gains(piece.graph.nodes) else _as_it_is(piece)

    return noticed(compile_around_rnns(gm, example_inputs, compile_piece, is_apart))


def _untouched(
    gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compiler
) -> Callable[..., Any]:
    """Compile Dynamo's graph, cut at its RNNs where possible: it must be compiled in any case.

    Under autocast an RNN may return another dtype than its input has, so the code after it can't
    be compiled before the RNN has run.
    """
    if why_off(Part.RECURRENT) is not None and any(n.target in PACKETS for n in gm.graph.nodes):
        return _as_it_is(gm)  # AOTAutograd takes no LSTM that is for oneDNN
    if not autocast_is_on():
        name_rnns(gm)
        with contextlib.suppress(CannotRewrite):
            return _rewritten(gm, example_inputs, compile_graph)
    return noticed(compile_graph(gm, example_inputs))


def _compiled(
    compile_graph: Compiler, gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Compile, with mpcompile's version as part of the key of AOTAutograd's cache.

    The cache's key names our operators, but an entry holds what their implementations traced to.
    Attributes of the graph module are part of the key.
    """
    gm._mpcompile_version = __version__  # type: ignore[assignment]
    return compile_graph(gm, example_inputs)


def _inductor(
    mode: str | None,
    options: Mapping[str, Any] | None,
    joint: JointPasses,
    inner: Callable[..., Any] | None = None,
    verify: Verify | None = None,
) -> Compiler:
    """Compile as torch.compile itself does for `mode` and `options` (options beat mode)."""
    # `inner` is shown what is kept, in the dtypes in which it is computed.
    halves = _KEPT if inner is not None else (*_KEPT, *joint.halves)
    joint = replace(joint, halves=halves)
    whole = inductor_for(mode, with_joint_passes(options, joint))
    if inner is None:
        asked = verify or Verify(when=False)
        return lambda gm, inputs: compile_verified(gm, inputs, whole.config, asked)
    compiler = functools.partial(compile_fx, inner_compile=inner, config_patches=whole.config)
    # The backward is handed to `inner` now, not when someone calls `backward()`.
    eager = names.aot_settings(enable_autograd_cache=False, force_non_lazy_backward_lowering=True)
    return eager(compiler)  # type: ignore[no-any-return]


def check_inductor(mode: str | None, options: Mapping[str, Any] | None) -> None:
    """Ask torch.compile, before anything is compiled, whether it knows `mode` and `options`.

    Raises:
        MPCompileError: torch.compile doesn't know one of them.
    """
    try:
        _inductor(mode, options, NO_PASSES)
    except (RuntimeError, TypeError, ValueError) as error:
        text, _, known = str(error).partition(", known options")
        wrong, names = text.rpartition(" ")[2], re.findall(r"'([\w.]+)'", known)
        asked = {"mode": mode, "options": options}
        given = ", ".join(f"{k}={v!r}" for k, v in asked.items() if v is not None)
        raise MPCompileError(f"{given}: {text}{did_you_mean(wrong, names)}") from None


def _aot_eager(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    compile_graph = names.aot_autograd(
        fw_compiler=_op_by_op, bw_compiler=_op_by_op,
        partition_fn=Partitioner(None, JointPasses(halves=_KEPT)),
        keep_inference_input_mutations=True,
    )  # fmt: skip
    return compile_graph(gm, list(example_inputs))


def _op_by_op(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Run a graph of AOTAutograd's, without autocast, because `backward()` may be called under it.

    (Inductor's code calls no operator that autocast changes.)
    """
    return boxed(_without_autocast(names.boxed_nop(gm, list(example_inputs))))


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with autocast_off():
            return function(*args)

    return run
