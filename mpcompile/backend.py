"""The torch.compile backend: Dynamo graph -> capture -> passes -> emit.

One graph in, one callable out. Whatever can't be captured or rewritten safely is compiled
unchanged, with one warning that says why; under `strict=True` it is an error. Nothing in between.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import RestartAnalysis

from . import (
    ir,
    operators,  # noqa: F401  (registers ours)
    pipeline,
)
from .calls import uncalled
from .capture.capture import capture
from .devices.facts import SUPPORTED
from .emit.accumulation import check_accumulation
from .emit.emitter import emit
from .emit.islands import has_rnn
from .emit.joint import JointPass, joint_passes
from .errors import CannotRewrite, MPCompileError, MPCompileWarning
from .inspect.advice import say_nothing_runs_low
from .inspect.plan import Plan
from .ir.fakes import fake_of_fixed_size
from .ir.updates import is_update
from .padding.products import product
from .planner.target import Target, target_of
from .rules.policy import Config, Level
from .settings import Settings
from .state import copies, fit, guard
from .state.loss_scale import LossScale

# Told of each graph: its plan, or None where it was left in FP32.
Listener = Callable[[Plan | None], None]


def mpcompile_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend that `torch.compile(model, backend="mpcompile", options={...})` finds.

    `options` takes the keywords of `mpcompile()`; its own `"options"` entry goes to Inductor.
    """
    request = dict(options or {})
    listener: Listener | None = request.pop("_listener", None)
    settings = Settings.parse({**request, **({"mode": mode} if mode else {})})
    uncalled.reached(example_inputs)
    compiled, plan = _compile_or_fall_back(gm, example_inputs, settings)
    if listener is not None:
        listener(plan)
    return compiled


def _compile_or_fall_back(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings
) -> tuple[Callable[..., Any], Plan | None]:
    if settings.level is Level.O0 or is_update(gm, example_inputs):
        return _emit(gm, example_inputs, settings, untouched=True), None
    try:
        return _compile(gm, example_inputs, settings)
    except (MPCompileError, RestartAnalysis):  # the latter asks Dynamo to trace once more
        raise
    except Exception as error:
        reason = reason_of(error)
        if settings.strict:
            raise MPCompileError(
                f"this graph can't be rewritten: {reason}. Without strict=True it would be "
                "compiled unchanged, in FP32"
            ) from error
        warnings.warn(
            f"mpcompile left a graph in FP32: {reason}. It is compiled unchanged; pass strict=True "
            "to make this an error",
            MPCompileWarning,
            stacklevel=2,
        )
        return _emit(gm, example_inputs, settings, untouched=True), None


def reason_of(error: Exception) -> str:
    """Why a graph can't be rewritten, in one line."""
    if isinstance(error, CannotRewrite):
        return str(error)
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0]}"


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings
) -> tuple[Callable[..., Any], Plan]:
    tensors = [x for x in example_inputs if isinstance(x, torch.Tensor)]
    device = _device_of(tensors)
    target = target_of(device, settings.dtype)
    low = target.low
    trained = [x for x in tensors if x.requires_grad]
    scale = _scale_for(trained, low, settings) if torch.is_grad_enabled() else None
    owned = _owned(example_inputs) if settings.level is Level.O2 else {}
    config = config_for(
        target,
        settings,
        scaled=scale is not None,
        copied={i: copies.stored_shape(example_inputs[i], low) for i in owned},
    )
    captured, plan = rewrite(gm, example_inputs, config, dump=settings.dump)
    if device.type == "cuda":
        check_accumulation(low)
    if not config.promised and not plan.counts().get("LOW") and _has_products(captured):
        say_nothing_runs_low(device.type, low)
    scale = scale if plan.scaled else None
    read, inputs = _with_working_copies(captured, example_inputs, owned, low, scale)
    if scale is not None:
        inputs += scale.inputs(device)
    graph = captured
    if has_rnn(captured) and not plan.counts().get("LOW") and settings.emit == "inductor":
        # As torch.compile does with an RNN: what is compiled in pieces around one gains nothing.
        settings = replace(settings, emit="eager", mode=None, recompute=False)
        if not plan.changed and not any(map(ir.autocast_region, captured.graph.nodes)):
            graph = gm  # torch's own functions: their calls cost less than those of operators
    searches = scale is not None and scale.fitting and _can_run_again(captured, settings, device)
    compiled = _emit(graph, inputs, settings, joint=joint_passes(config))
    if scale is not None and searches:
        scale.searched = True
        compiled = fit.fitting(compiled, scale, read.keys())
    if read:
        # A scale that two optimizers move may move between two backwards of the same gradient.
        single = scale is None or len({id(owned[i]) for i in owned}) == 1
        compiled = _with_copies(compiled, copies.Reader(low, scale, low_gradients=single), read)
    if scale is not None:
        leaves = [i for i, x in enumerate(example_inputs) if _is_leaf(x)]
        scale.open |= len(trained) > len(leaves)
        compiled = _with_scale(compiled, scale, device, leaves, example_inputs)
    return compiled, plan


def config_for(
    target: Target,
    settings: Settings,
    *,
    scaled: bool,
    copied: Mapping[int, tuple[int, ...] | None],
) -> Config:
    """The settings and the facts of the device, as the passes see them."""
    return Config(
        level=settings.level,
        low=target.low,
        device=target.device,
        policy=settings.policy,
        scaled=scaled,
        pad=settings.pad,
        profile=target.profile,
        promised=target.promised,
        cores=target.cores,
        copied=copied,
        fuse_head=settings.fuse_head,
        has_kernel=target.has_kernel,
    )


def rewrite(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: Config, *, dump: Path | None
) -> tuple[fx.GraphModule, Plan]:
    """Capture Dynamo's graph and run every pass over it: the graph to emit, and its plan.

    Raises:
        CannotRewrite: it can't be captured, or a pass found it unsafe to rewrite.
    """
    start = time.perf_counter()
    with _unseen():
        captured = capture(gm, example_inputs, planned_for=config.device.type)
    spent = time.perf_counter() - start
    with _unseen(), torch._C._DisableAutocast():
        return captured, pipeline.run(captured, config, captured_in=spent, dump=dump)


def _has_products(gm: fx.GraphModule) -> bool:
    return any(product(node) is not None for node in gm.graph.nodes)


def _unseen() -> contextlib.AbstractContextManager[Any]:
    """For operators that passes run on fakes and kernels.py on samples. The caller's hooks on saved
    tensors may count what they see, as an activation checkpoint's do.

    Torch internals used here were read in torch 2.13 and exist in 2.11.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def _with_working_copies(
    captured: fx.GraphModule,
    example_inputs: Sequence[Any],
    owned: Mapping[int, Any],
    low: torch.dtype,
    scale: LossScale | None,
) -> tuple[dict[int, int], list[Any]]:
    """The graph's inputs with working copies where it reads them: which input is the copy of which
    of the caller's, and all of them to compile with.
    """
    placeholders = captured.graph.find_nodes(op="placeholder")
    read = {k: of for k, n in enumerate(placeholders) if (of := ir.copy_of(n)) is not None}
    in_full = [x for i, x in enumerate(example_inputs) if i in owned and i not in read]
    copies.read_in_full([x for x in in_full if _is_leaf(x)])
    inputs = [*example_inputs, *itertools.repeat(None, sum(k >= len(example_inputs) for k in read))]
    for k, of in read.items():
        master = example_inputs[of]
        if torch.is_grad_enabled():  # an evaluation's graph stores no gradients
            copies.check_one_scale(master, scale, f"input {of} of a graph")
        shape = ir.value(placeholders[k]).shape
        copy = copies.copy_of(master, low, shape)
        copy.refresh(master)
        stored = copy.stored.detach()
        inputs[k] = fake_of_fixed_size(stored.requires_grad_(master.requires_grad))
    return read, inputs


def _owned(example_inputs: Sequence[Any]) -> dict[int, Any]:
    """The inputs that are parameters of an MPOptimizer, and which one."""
    owners = {
        i: copies.owner_of(x)
        for i, x in enumerate(example_inputs)
        if isinstance(x, torch.nn.Parameter) and x.dtype is torch.float32
    }
    return {i: owner for i, owner in owners.items() if owner is not None}


def _with_copies(
    compiled: Callable[..., Any], reader: copies.Reader, read: Mapping[int, int]
) -> Callable[..., Any]:
    """Hand working copies to the graph: its input -> of which of the caller's."""
    width = max(read) + 1

    def call(*args: Any) -> Any:
        tensors = dict(zip(read, reader.read([args[of] for of in read.values()]), strict=True))
        # Copies that are inputs of their own stand behind the caller's, before the loss scale.
        plain = args[: len(args) - 2] if reader.scale is not None else args
        own = [tensors[k] for k in range(len(plain), width)]
        inputs = [tensors.get(k, x) for k, x in enumerate(plain)]
        return compiled(*inputs, *own, *args[len(plain) :])

    return call


def _emit(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    settings: Settings,
    *,
    joint: Sequence[JointPass] = (),
    untouched: bool = False,
) -> Callable[..., Any]:
    return emit(
        gm, inputs, settings.emit, mode=settings.mode, options=settings.options, joint=joint,
        recompute=settings.recompute, untouched=untouched,
    )  # fmt: skip


def _device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Where the graph's parameters live; without any, its first tensor."""
    parameters = [x for x in tensors if isinstance(x, torch.nn.Parameter)]
    device = (parameters or tensors)[0].device if tensors else torch.device("cpu")
    if device.type not in SUPPORTED:
        raise CannotRewrite(f"device {device.type!r} is not supported")
    return device


def _scale_for(
    trained: Sequence[torch.Tensor], low: torch.dtype, settings: Settings
) -> LossScale | None:
    """The scale this graph multiplies by: the user's, its parameters' own, or a new one."""
    given = copies.given_scale(trained)
    if given is not None and (settings.loss_scale is None or settings.loss_scale.fp16_only):
        return given if given.active else None
    if not trained or (low is torch.bfloat16 and not settings.scale_any_dtype):
        return None
    if settings.loss_scale is not None:
        return settings.loss_scale if settings.loss_scale.active else None
    return guard.scale_of(trained) or LossScale.default()


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _with_scale(
    compiled: Callable[..., Any],
    scale: LossScale,
    device: torch.device,
    leaves: Sequence[int],
    example_inputs: Sequence[Any],
) -> Callable[..., Any]:
    """Hand the live scale to the graph, and let optimizers of its parameters know whose it is."""

    def watch(args: Sequence[Any]) -> list[weakref.ref[torch.Tensor]]:
        guard.watch([args[i] for i in leaves], scale)
        return [weakref.ref(args[i]) for i in leaves]

    known = watch(example_inputs)

    def call(*args: Any) -> Any:
        nonlocal known
        # Dynamo may run this graph with another module's parameters of the same shapes.
        if any(ref() is not args[i] for ref, i in zip(known, leaves, strict=True)):
            known = watch(args)
        scale.saw_forward()
        return compiled(*args, *scale.inputs(device))

    return call


def _can_run_again(gm: fx.GraphModule, settings: Settings, device: torch.device) -> bool:
    """Whether a call of the graph may be repeated on copies of what it writes to.

    Not if autograd sees the write, nor if inputs share memory, which copies would not, or a result
    shows an input's. CUDA graphs are left alone: what they replay is bound to addresses.
    """
    # A working copy was captured as what it is the copy of, but has memory of its own.
    inputs = [n for n in gm.graph.find_nodes(op="placeholder") if ir.copy_of(n) is None]
    memory = [at for node in inputs if (at := ir.storage(node)) is not None]
    tracked = any(map(ir.is_write_back, gm.graph.nodes))
    shown = not set(memory).isdisjoint(gm.meta["mp_output_memory"])
    cudagraphs = settings.mode in ("reduce-overhead", "max-autotune") or bool(
        (settings.options or {}).get("triton.cudagraphs")
    )
    return (
        len(set(memory)) == len(memory)
        and not tracked
        and not shown
        and not (cudagraphs and device.type == "cuda")
    )
