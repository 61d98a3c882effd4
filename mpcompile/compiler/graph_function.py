"""A planned graph -> the function that Dynamo calls: emitted, and wrapped so that a call gets its
extra inputs. Likewise for a graph that was left as Dynamo wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .. import ir
from ..capture import pipeline
from ..capture.compile_log import say_nothing_runs_low, say_products_stay
from ..capture.pipeline import Planned
from ..devices.registry import capabilities, check_accumulation
from ..ir.dtypes import HALF
from ..ir.fakes import fake_twin
from ..ir.inputs import GraphInputs
from ..lower.emitter import emit
from ..lower.inference import replays
from ..lower.islands import gains, has_rnn, is_apart, pieces
from ..lower.joint import JointPasses, joint_passes
from ..padding.products import product
from ..planner.partitioned import Partitioned
from ..planner.target import place_of
from ..rules.policy import Target
from ..scaling import agreement, copies, fit_scale
from ..scaling.loss_scale import LossScale
from ..settings import Settings
from ..torch_inside.dynamo import traced_code
from ..verify.verdicts import Verify
from .graph_call import Emitted, wrapped
from .repair import Repairable
from .training import Training

Function = Callable[..., Any]


def function_of(
    gm: fx.GraphModule, planned: Planned, known: Training, settings: Settings, verify: Verify
) -> Function:
    """Emit a rewritten graph, and wrap it so that a call gets its extra inputs.

    Args:
        gm: the graph as Dynamo wrote it, which is emitted where nothing was rewritten.
        planned: the rewritten graph; it may be changed.
        known: what the training knows of it.
        settings: how it is emitted.
        verify: how what is compiled is verified.

    Raises:
        CannotRewrite, MPCompileError: see `emit` and `Training.copies_for`.
    """
    target, examples, scale = known.facts.target, known.examples, known.scale_in(planned)
    _heed_the_device(planned, target)
    in_full = known.read_in_full(planned)
    copies.read_in_full([examples[i] for i in in_full])
    sharded = agreement.enter_fsdp(examples)
    working = [
        fake_twin(copy.stored.detach().requires_grad_(master.requires_grad))
        for master, copy in known.copies_for(planned)
    ]
    scaling = scale.inputs(target.device) if scale is not None else ()
    given = planned.inputs.assembled(examples, working, scaling)
    to_emit, how, sparing = _to_emit(gm, planned, settings)
    # All of this before `emit`, which may change the graph.
    constant = planned.graph.meta["mp_constant_results"] if scale is not None else ()
    searches = scale is not None and _searches(scale, planned.graph, how, target.device)
    made = Emitted(
        examples, target.device, settings.names, planned.inputs, scale,
        reader=known.reader_for(planned), in_full=in_full, searches=searches, constant=constant,
        as_written=planned.graph.meta.get("mp_results_as_written", ()),
        repairable=Repairable(planned, traced_code()) if settings.repair and scale else None,
    )  # fmt: skip
    joint = joint_passes(
        settings.level, target.device, sharded=sharded, recompute=settings.recompute
    )
    run = emit(
        to_emit, given, how.emit, mode=how.mode, options=how.options, verify=verify,
        joint=joint, sparing=sparing,
    )  # fmt: skip
    return wrapped(run, made)


def function_of_left(
    gm: fx.GraphModule, examples: Sequence[Any], settings: Settings, verify: Verify
) -> Function:
    """Compile a graph unchanged, in FP32."""
    agreement.enter_fsdp(examples)  # other ranks may have rewritten this graph
    made = Emitted(examples, place_of(examples), settings.names, GraphInputs(len(examples)))
    joint = JointPasses(recomputes=settings.recompute)
    run = emit(
        gm, examples, settings.emit, mode=settings.mode, options=settings.options, verify=verify,
        joint=joint, untouched=True,
    )  # fmt: skip
    return wrapped(run, made)


def split(
    gm: fx.GraphModule, inputs: Sequence[Any], settings: Settings, found: Partitioned,
    device: torch.device | None, *, is_there: bool,
) -> Function:  # fmt: skip
    """Compile a graph as far as AOTAutograd's partitioner, whose halves `found` gets.

    Args:
        device: what the graph was rewritten for; None: it was left as Dynamo wrote it.
        is_there: whether this machine has the device: some passes call its kernels.
    """
    joint = JointPasses(recomputes=settings.recompute)
    if device is not None:
        joint = joint_passes(settings.level, device, recompute=settings.recompute)
    if not is_there:
        joint = replace(joint, joint=(), halves=(), lowered=())
    return emit(
        gm, inputs, "inductor", options={"joint_custom_pre_pass": found.joint}, joint=joint,
        untouched=device is None, inner=found.inner,
    )  # fmt: skip


def _heed_the_device(planned: Planned, target: Target) -> None:
    """Say so if a setting of the device may round sums, if the device gains nothing by `low`, or if
    products stay in FP32 where it would.
    """
    check_accumulation(target.device, target.low)
    if target.promised:
        say_products_stay(planned.plan.nodes)
        return
    multiplies = any(product(node) is not None for node in planned.graph.graph.nodes)
    if multiplies and not planned.plan.counts().get("LOW"):
        say_nothing_runs_low(capabilities(target.device).word, target.low)


def _to_emit(
    gm: fx.GraphModule, planned: Planned, settings: Settings
) -> tuple[fx.GraphModule, Settings, bool]:
    """The graph to emit, the settings to emit it with, and whether to compile sparingly."""
    graph, plan = planned.graph, planned.plan
    if settings.emit != "inductor" or not has_rnn(graph) or plan.counts().get("LOW"):
        return graph, settings, False
    if any(map(gains, pieces(graph.graph, is_apart))):
        return graph, settings, True
    eager = replace(settings, emit="eager", mode=None, recompute=False)
    rewritten = not {pass_.__name__ for pass_ in pipeline.FOLDING}.issuperset(plan.changed)
    rewritten |= any(map(ir.autocast_region, graph.graph.nodes))
    # Unchanged, Dynamo's graph: torch's functions cost less to call than its operators.
    return graph if rewritten else gm, eager, False


def _searches(
    scale: LossScale, graph: fx.GraphModule, settings: Settings, device: torch.device
) -> bool:
    """Whether backward passes of the graph can search for the scale. Not where all is FP32: every
    scale would fit. Nor in a CUDA graph, which reads and writes fixed addresses.
    """
    parts = [part for part in graph.modules() if isinstance(part, fx.GraphModule)]
    made = [ir.tensors_of(node.meta.get("val")) for part in parts for node in part.graph.nodes]
    low = any(tensor.dtype in HALF for tensors in made for tensor in tensors)
    if not (scale.fitting and low and fit_scale.can_run_again(graph)):
        return False
    if settings.emit == "inductor" and replays(settings.mode, settings.options, device):
        scale.said.unsearched(scale.value)
        return False
    return True
