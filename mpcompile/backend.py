"""The torch.compile backend: Dynamo graph -> capture -> passes -> emit.

One graph in, one callable out. A graph that can't be captured or rewritten safely is compiled
unchanged, as a whole, with one warning that says why; under `strict=True` it is an error.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from . import (
    ir,
    operators,  # noqa: F401  (registers our operators)
    pipeline,
)
from .calls import uncalled
from .calls.graph_call import is_leaf, with_extra_inputs
from .calls.outside import counted
from .calls.under_ddp import noticing_ddp
from .calls.watched_call import Watched
from .calls.witness import constants_of
from .capture.breaks import why_it_ends
from .capture.capture import capture
from .capture.on_fakes import unseen
from .capture.provenance import Names, nobody
from .devices.registry import capabilities, is_supported
from .emit.accumulation import check_accumulation
from .emit.emitter import emit
from .emit.fusing import gains, is_apart
from .emit.islands import has_rnn, pieces
from .emit.joint import NO_PASSES, JointPasses, joint_passes
from .emit.tracing_settings import or_broken
from .errors import CannotRewrite, MPCompileError, MPCompileWarning, in_one_line
from .inspect.advice import say_nothing_runs_low, say_products_stay
from .inspect.graph_plan import GraphPlan, plan_of_left
from .inspect.log_graph import log_graph
from .inspect.trace import trace_graph
from .ir.fakes import fake_of_fixed_size
from .ir.inputs import GraphInputs
from .ir.updates import is_update
from .padding.products import product
from .planner.target import Target, target_of
from .rules.formats import Format
from .rules.policy import Config, Level
from .settings import Settings
from .state import copies, fit_scale, hooks, parameters, shardings
from .state.loss_scale import LossScale
from .state.repairs import Repairs
from .torch_inside.amp import autocast_off
from .torch_inside.dynamo import traced_code
from .torch_inside.dynamo_names import RestartAnalysis

# Called with the plan of each graph; the plan may say that the graph was left in FP32.
Listener = Callable[[GraphPlan], None]


def mpcompile_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend that `torch.compile(model, backend="mpcompile", options={...})` finds.

    `options` takes the keywords of `mpcompile()`; its entry `"options"` goes to Inductor. A
    `"policy"` that is a path is read for every graph: `Policy.load` reads a file once.
    """
    hooks.register()
    request = dict(options or {})
    listener: Listener | None = request.pop("_listener", None)
    names: Names = request.pop("_names", nobody)
    true = request.pop("_true_gradients", False)
    settings = Settings.parse({**request, **({"mode": mode} if mode else {})})
    settings = replace(settings, names=names, true_gradients=true)
    uncalled.reached(example_inputs)
    start = time.perf_counter()
    compiled, plan = _compile_or_fall_back(gm, example_inputs, settings)
    log_graph(plan, time.perf_counter() - start)
    if listener is not None:
        listener(replace(plan, ends_with=why_it_ends(gm)))
    return counted(compiled, plan.tensor_cores.flops)


def _compile_or_fall_back(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings
) -> tuple[Callable[..., Any], GraphPlan]:
    if (reason := why_left(gm, example_inputs, settings)) is not None:
        with or_broken(gm):
            return _leave(gm, example_inputs, settings, reason)
    try:
        with or_broken(gm):
            return _compile(gm, example_inputs, settings)
    except Exception as error:
        asked = isinstance(error, MPCompileError) and not isinstance(error, CannotRewrite)
        if asked or isinstance(error, RestartAnalysis):  # RestartAnalysis: Dynamo traces once more
            raise
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
        return _leave(gm, example_inputs, settings, reason)


def why_left(gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings) -> str | None:
    """Why a graph stays in FP32 whatever is in it, or None."""
    if settings.level is Level.O0:
        return 'level="O0" was asked for'
    if is_update(gm, example_inputs):
        return "it updates parameters in place, as an optimizer's step does; no update is rounded"
    return None


def _leave(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings, reason: str
) -> tuple[Callable[..., Any], GraphPlan]:
    """Compile a graph unchanged, in FP32."""
    plan = plan_of_left(reason, place_of(example_inputs))
    trace_graph(plan)
    low_wire = settings.reduces_low  # other ranks may have rewritten this graph
    shardings.enter(gm, example_inputs, None, None, hooked=low_wire)
    compiled = _emit(gm, example_inputs, settings, untouched=True)
    return noticing_ddp(compiled, example_inputs, None, None, hooked=low_wire), plan


def reason_of(error: Exception) -> str:
    """Why a graph can't be rewritten, in one line."""
    if isinstance(error, CannotRewrite):
        return str(error)
    return in_one_line(error)


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings
) -> tuple[Callable[..., Any], GraphPlan]:
    """Rewrite a graph, emit it, and wrap it so that a call gets its extra inputs."""
    device = device_of(example_inputs)
    target = target_of(device, settings.dtype)
    scale = scale_for(example_inputs, target.low, settings)
    owned = owned_in(example_inputs) if settings.level is Level.O2 else {}
    copied = {i: copies.stored_shape(example_inputs[i], target.low) for i in owned}
    config = config_for(target, settings, scaled=scale is not None, copied=copied)
    kept, repairs = (pipeline.Kept(), scale.repairs) if scale is not None else (None, None)
    captured, plan = rewrite(gm, example_inputs, config, settings, kept, repairs)
    inputs = GraphInputs.of(captured.graph)
    scale = scale if inputs.scaled else None
    _heed_the_device(captured, plan, config, device)
    note_read_in_full(example_inputs, owned, inputs)
    reduced_in = target.low if settings.reduces_low else None
    low_wire = settings.reduces_low
    shardings.enter(captured, example_inputs, reduced_in, scale, hooked=low_wire)
    working = _working_copies(captured, inputs, example_inputs, target.low, scale)
    given = inputs.assembled(example_inputs, working, scale.inputs(device) if scale else ())
    graph, how, sparing = _to_emit(gm, captured, plan, settings)
    # Both must come before `_emit`, which may change the graph.
    constant = constants_of(captured) if scale is not None else ()
    searches = scale is not None and scale.searches and not _replays(how, device)
    searches = searches and fit_scale.can_run_again(captured)
    joint = joint_passes(config, transformed=any(map(ir.in_functorch, captured.graph.nodes)))
    compiled = _emit(graph, given, how, joint=joint, sparing=sparing)
    if scale is not None and searches:
        scale.search.possible = True
        compiled = fit_scale.fitting(compiled, scale, inputs)
    if scale is not None:
        scale.open |= any(_is_trained(x) and not is_leaf(x) for x in example_inputs)
    reader = reader_of(inputs, owned, target.low, scale)
    if reader is not None and settings.true_gradients:
        reader.low_gradients = scale is None
    watched = Watched(kept, plan, traced_code(), repair=settings.repair) if kept else None
    call = with_extra_inputs(
        compiled, inputs, reader, scale, example_inputs, device, watched, searches, constant
    )
    return noticing_ddp(call, example_inputs, reduced_in, scale, hooked=low_wire), plan


_adjusted: ContextVar[Callable[[Config], Config]] = ContextVar("_adjusted", default=lambda c: c)


@contextlib.contextmanager
def adjusted(adjust: Callable[[Config], Config]) -> Iterator[None]:
    """Change the `Config` of every graph that is rewritten inside this context: for benchmarks and
    tests that ask, on one device, what would be decided for another.
    """
    token = _adjusted.set(adjust)
    try:
        yield
    finally:
        _adjusted.reset(token)


def config_for(
    target: Target,
    settings: Settings,
    *,
    scaled: bool,
    copied: Mapping[int, tuple[int, ...] | None],
) -> Config:
    """The `Config` that the passes get: the settings and the facts of the device."""
    return Config(
        level=settings.level,
        format=Format(target.low),
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
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    settings: Settings,
    keep: pipeline.Kept | None = None,
    repairs: Repairs | None = None,
) -> tuple[fx.GraphModule, GraphPlan]:
    """Capture Dynamo's graph and run every pass over it. Returns the graph to emit, and its plan.

    `keep` takes copies of the graph before and after the passes; `repairs` pins operators to FP32.

    Raises:
        CannotRewrite: the graph can't be captured, or a pass found it unsafe to rewrite.
    """
    config = _adjusted.get()(config)
    start = time.perf_counter()
    with unseen():
        captured = capture(gm, example_inputs, planned_for=config.device.type, names=settings.names)
    spent = time.perf_counter() - start
    if repairs is not None:
        config = replace(config, repaired=repairs.in_graph(captured.graph))
    with unseen(), autocast_off():
        return captured, pipeline.run(
            captured,
            config,
            captured_in=spent,
            dump=settings.dump,
            disabled=settings.disable_passes,
            keep=keep,
        )


def _heed_the_device(
    captured: fx.GraphModule, plan: GraphPlan, config: Config, device: torch.device
) -> None:
    """Say so if a setting of the device may round sums, if the device gains nothing by `low`, or if
    products stay in FP32 where it would.
    """
    check_accumulation(device, config.low)
    nothing_low = not config.promised and not plan.counts().get("LOW")
    if nothing_low and any(product(node) is not None for node in captured.graph.nodes):
        say_nothing_runs_low(capabilities(device).word, config.low)
    if config.promised:
        say_products_stay(plan.nodes)


def note_read_in_full(
    example_inputs: Sequence[Any], owned: Mapping[int, Any], inputs: GraphInputs
) -> None:
    """Note parameters of an optimizer that the graph reads in FP32: their gradients stay FP32."""
    in_full = [example_inputs[i] for i in owned if i not in inputs.copies]
    copies.read_in_full([x for x in in_full if is_leaf(x)])


def _working_copies(
    captured: fx.GraphModule,
    inputs: GraphInputs,
    example_inputs: Sequence[Any],
    low: torch.dtype,
    scale: LossScale | None,
) -> list[torch.Tensor]:
    """The working copies (fakes) to compile the graph with, in the order of `inputs.copies`."""
    placeholders = captured.graph.find_nodes(op="placeholder")
    working = []
    for k, of in inputs.copies.items():
        master = example_inputs[of]
        if torch.is_grad_enabled():  # an evaluation's graph stores no gradients
            copies.check_one_scale(master, scale, f"input {of} of a graph")
        copy = copies.copy_of(master, low, ir.value(placeholders[k]).shape)
        copy.refresh(master)
        stored = copy.stored.detach()
        working.append(fake_of_fixed_size(stored.requires_grad_(master.requires_grad)))
    return working


def reader_of(
    inputs: GraphInputs, owned: Mapping[int, Any], low: torch.dtype, scale: LossScale | None
) -> copies.Reader | None:
    if not inputs.copies:
        return None
    # If two optimizers move one scale, it may change between two backwards of the same gradient.
    single = scale is None or len({id(owner) for owner in owned.values()}) == 1
    return copies.Reader(low, scale, low_gradients=single)


def owned_in(example_inputs: Sequence[Any]) -> dict[int, Any]:
    """The inputs that are parameters of an MPOptimizer: input number -> that optimizer."""
    owners = {
        i: parameters.owner_of(x)
        for i, x in enumerate(example_inputs)
        if isinstance(x, torch.nn.Parameter) and x.dtype is torch.float32
    }
    return {i: owner for i, owner in owners.items() if owner is not None}


def _to_emit(
    gm: fx.GraphModule, captured: fx.GraphModule, plan: GraphPlan, settings: Settings
) -> tuple[fx.GraphModule, Settings, bool]:
    """The graph to emit, the settings to emit it with, and whether to compile sparingly."""
    if settings.emit != "inductor" or not has_rnn(captured) or plan.counts().get("LOW"):
        return captured, settings, False
    if any(map(gains, pieces(captured.graph, is_apart))):
        return captured, settings, True
    eager = replace(settings, emit="eager", mode=None, recompute=False)
    rewritten = not {pass_.__name__ for pass_ in pipeline.FOLDING}.issuperset(plan.changed)
    rewritten |= any(map(ir.autocast_region, captured.graph.nodes))
    # Unchanged, Dynamo's graph: torch's functions cost less to call than its operators.
    return captured if rewritten else gm, eager, False


def _emit(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    settings: Settings,
    *,
    joint: JointPasses = NO_PASSES,
    untouched: bool = False,
    sparing: bool = False,
) -> Callable[..., Any]:
    return emit(
        gm, inputs, settings.emit, mode=settings.mode, options=settings.options, joint=joint,
        recompute=settings.recompute, untouched=untouched, sparing=sparing,
    )  # fmt: skip


def place_of(example_inputs: Sequence[Any]) -> torch.device:
    """The device of the graph's parameters; without parameters, that of its first tensor."""
    tensors = [x for x in example_inputs if isinstance(x, torch.Tensor)]
    parameters = [x for x in tensors if isinstance(x, torch.nn.Parameter)]
    return (parameters or tensors)[0].device if tensors else torch.device("cpu")


def device_of(example_inputs: Sequence[Any]) -> torch.device:
    """The device to plan a graph for. Raises CannotRewrite if mpcompile doesn't support it."""
    device = place_of(example_inputs)
    if not is_supported(device):
        raise CannotRewrite(f"device {device.type!r} is not supported")
    return device


def scale_for(
    example_inputs: Sequence[Any], low: torch.dtype, settings: Settings
) -> LossScale | None:
    """The scale this graph multiplies by: the user's, its parameters' own, or a new one."""
    if not torch.is_grad_enabled():
        return None
    trained = [x for x in example_inputs if _is_trained(x)]
    given = parameters.given_scale(trained)
    if given is not None and (settings.loss_scale is None or settings.loss_scale.fp16_only):
        return given if given.active else None
    if not trained or (low is torch.bfloat16 and not settings.scale_any_dtype):
        return None
    if settings.loss_scale is not None:
        return settings.loss_scale if settings.loss_scale.active else None
    return parameters.scale_of(trained) or LossScale.default()


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _replays(settings: Settings, device: torch.device) -> bool:
    """Whether the graph becomes a CUDA graph, which reads and writes fixed addresses."""
    cudagraphs = settings.mode in ("reduce-overhead", "max-autotune") or bool(
        (settings.options or {}).get("triton.cudagraphs")
    )
    return cudagraphs and capabilities(device).cuda_graphs
