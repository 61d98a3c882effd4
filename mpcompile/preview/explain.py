"""What mpcompile does with a model, without doing it: `explain(model, *inputs)`.

Dynamo traces a copy of the model without data (`stand_ins.py`). Each graph is rewritten as in a
compile, and split by AOTAutograd and its partitioner into forward and backward; there it ends: no
code is generated, nothing is trained. Between two graphs the program continues with stand-ins. With
`device="t4"` the passes run with the facts of that GPU's data sheet (`planner/target.py`).
"""

from __future__ import annotations

import functools
import os
import re
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from .. import ir
from .._version import __version__
from ..capture.pipeline import Planned
from ..capture.surroundings import around_now
from ..compiler.backend import planned_or_why, why_left
from ..compiler.graph_function import split
from ..compiler.plan_graph import Facts
from ..compiler.training import fp32_parameters, owned_in, reads_copies, scale_for, stored_shapes
from ..devices.autocast import noting_regions
from ..devices.cuda import AbsentGPU
from ..devices.gpus import gpu
from ..errors import MPCompileError, in_one_line, warn
from ..ir.fakes import fake_twin, memory_for
from ..planner.graph_plan import GraphPlan, plan_of_left
from ..planner.partitioned import Partitioned
from ..planner.plan_data import ModuleLine, OutsideLine
from ..planner.target import Repairs, device_of, place_of, target_of
from ..planner.times import ATTENTION
from ..plans.model_plan import Plan
from ..rules.policy import Level, Policy, Target
from ..runtime.check_module import check_call, check_module, matched_nothing
from ..runtime.half_inputs import widened, widens_inputs
from ..runtime.left_to_python import looked_into
from ..runtime.records import pinned_in, settings_like, studied
from ..settings import OPTIONS, LevelWord, Pads, Settings, documented
from ..torch_inside.breaks import users_frame, why_it_ends
from ..torch_inside.modules import names_in
from ..torch_inside.names import (
    BackendCompilerFailed,
    DataDependentOutputException,
    DynamicOutputShapeException,
    TorchRuntimeError,
    pytree,
)
from ..torch_inside.outside_products import aside, counted
from ..torch_inside.owned_backend import compiled_apart, nothing_compiled, weakly
from ..torch_inside.tracing_settings import settings_for, traced_with
from .stand_ins import Answers, StandIns, no_trace

# A program without values can't tell what such a call returns, or of which size.
_ON_VALUES = (
    DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode,
)  # fmt: skip


@documented
def explain(
    model: nn.Module,
    *inputs: Any,
    device: str | None = None,
    dtype: torch.dtype | str | None = None,
    level: Level | LevelWord | None = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    pad: Pads | None = None,
    dump: str | Path | None = None,
    fuse_head: bool | None = None,
    recompute: bool | None = None,
    disable_passes: Collection[str] | None = None,
    mp_optimizer: bool | None = None,
    **kwargs: Any,
) -> Plan:
    """Explain what mpcompile does with a training forward of `model(*inputs, **kwargs)`.

    Nothing is trained. The model, its gradients and buffers, what it was compiled to, and the
    random states stay unchanged: a copy of the model without data is traced. The copy takes no
    memory, so the model and its inputs may also lie on "meta".

    Args:
        model: an nn.Module with FP32 parameters, in the mode (train or eval) to explain. It may be
            compiled by `mpcompile()` or not.
        inputs: arguments of the model's call: tensors of any shapes; their values don't matter.
        device: None: the device that the model lies on. Or a GPU, which need not be there: "h100",
            "a100", "t4" and others: an unknown name is refused with the list of them.
        {plans}: as for `mpcompile()`. None: what the model was compiled with; the default of
            `mpcompile()` if it was not. A compiled model's `dump` is not taken over.
        mp_optimizer: whether an `MPOptimizer` holds the parameters; matters at O2, and at O1 on
            a CPU. None: whether one holds them now.
        **kwargs: the other arguments of the model's call.

    Returns:
        The plans of all graphs, forward and backward, and what they save for the backward. Sizes
        are taken as fixed.

    Raises:
        MPCompileError: an unknown GPU, a bad argument, a model that mpcompile refuses or that can't
            be copied, a call of the model that fails, or one that depends on values.
    """
    options = {name: value for name, value in locals().items() if name in OPTIONS}
    return plan_call(
        model, inputs, kwargs, device=device, mp_optimizer=mp_optimizer, options=options
    )


def plan_for(model: nn.Module, *inputs: Any, device: str | None = None, **kwargs: Any) -> Plan:
    """`explain` by another name, for a GPU that this machine need not have."""
    return explain(model, *inputs, device=device, **kwargs)


def plan_call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    device: str | None,
    mp_optimizer: bool | None = None,
    options: Mapping[str, Any],
) -> Plan:
    """`explain`, for models whose arguments may have the names of options."""
    sheet, model = None if device is None else gpu(device), studied(model, "explain")
    settings = settings_like(model, options)
    if mp_optimizer is not None and not isinstance(mp_optimizer, bool):
        raise MPCompileError(f"mp_optimizer={mp_optimizer!r}: use True or False")
    check_call(model, args, kwargs, options_of=explain)
    absent = None if sheet is None else target_of(AbsentGPU(sheet), settings.dtype)
    stand_ins = StandIns()
    twin = stand_ins.of_module(model)
    check_module(twin, settings)
    settings = replace(settings, names=names_in(twin))
    repairs = pinned_in(model)
    planner = Planner(settings, absent, stand_ins, mp_optimizer, repairs)
    given = pytree.tree_map_only(torch.Tensor, stand_ins.of_tensor, (tuple(args), dict(kwargs)))
    with torch.inference_mode(False), torch.enable_grad(), no_trace(), stand_ins.mode:
        run = functools.partial(_run, twin, _compiled(twin, planner), *given)
        call = functools.partial(Answers.in_turn, run)
        outside = looked_into(call, twin, functools.partial(_compiled, planner=planner))
    if not planner.graphs:
        raise nothing_compiled(type(model).__name__)
    for complaint in matched_nothing(settings, planner.graphs):
        warn(f"mpcompile: {complaint}")
    target = absent or target_of(place_of([*twin.parameters(), *given[0]]), settings.dtype)
    full = settings.level is Level.O0
    return Plan(
        model=type(model).__name__,
        level=settings.level.value,
        dtype="float32" if full else str(target.low).removeprefix("torch."),
        device=str(target.device),
        graphs=tuple(planner.graphs),
        modules=tuple(ModuleLine(path, type(m).__name__) for path, m in model.named_modules()),
        versions={"mpcompile": __version__, "torch": torch.__version__},
        gpu=sheet,
        repairs=tuple(repairs.events),
        outside=tuple(OutsideLine(*line) for line in outside.modules.most_common()),
        share_in_graphs=outside.share,
    )


def _compiled(what: Any, planner: Planner) -> Callable[..., Any]:
    """A model's call, or a function, compiled so that Dynamo passes each graph to the planner."""
    # Dynamo keeps each backend that it was given for as long as the process runs.
    compiled = compiled_apart(what, weakly(planner.planned), "plan")
    return traced_with(noting_regions(compiled), aside, **settings_for(what))


def _run(
    twin: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Call the model, and say what is wrong where that fails."""
    if widens_inputs(twin):
        args, kwargs = widened(args, kwargs)
    name = type(twin).__name__
    try:
        call(*args, **kwargs)
    except MPCompileError:
        raise
    except Exception as error:
        inner = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
        if isinstance(inner, MPCompileError):
            raise inner from inner.__cause__
        if isinstance(inner, _ON_VALUES):
            what = f" ({inner.func})" if hasattr(inner, "func") else ""
            raise MPCompileError(
                f"{name} goes on with the values of a tensor{what}{place(inner)}, and a plan is "
                "made without values: plan for the modules that it is made of"
            ) from error
        raise MPCompileError(f"{name} fails on these inputs: {described(inner)}") from error


@dataclass(eq=False)
class Planner:
    """Plans each graph, partitions it, and runs it on stand-ins.

    Dynamo calls a backend without fake mode, so kernels are tried on real samples.

    Attributes:
        settings: the options.
        absent: the GPU to plan for, which isn't there; None: the device that a graph lies on.
        stand_ins: made the model and the inputs.
        mp_optimizer: whether an `MPOptimizer` holds the parameters; None: ask each of them.
        repairs: what `repair=True` has pinned while the model trained.
        graphs: the plan of each graph so far.
    """

    settings: Settings
    absent: Target | None
    stand_ins: StandIns
    mp_optimizer: bool | None
    repairs: Repairs
    graphs: list[GraphPlan] = field(default_factory=list)

    def planned(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """A torch.compile backend."""
        if (reason := why_left(gm, example_inputs, self.settings)) is not None:
            return self._leave(gm, example_inputs, reason)
        ends_with = why_it_ends(gm)
        facts = self._facts(gm, example_inputs)
        planned = planned_or_why(gm, example_inputs, self.settings, lambda: facts)
        if isinstance(planned, str):
            return self._leave(gm, example_inputs, planned)
        if self.absent is not None:
            _attend_as_fused(planned.graph)
        inputs = planned.inputs
        working = self._working_copies(planned, example_inputs, facts.target.low)
        # The scale, and the leaf that counts overflows.
        beside = place_of(example_inputs)
        kinds = (False, True) if inputs.scaled else ()
        scaling = [torch.zeros((), device=beside, requires_grad=leaf) for leaf in kinds]
        fixed = [fake_twin(copy) for copy in working]
        given = inputs.assembled(example_inputs, fixed, scaling)
        run = self._emit(planned.graph, given, replace(planned.plan, ends_with=ends_with), facts)
        flops = planned.plan.tensor_cores.flops
        return counted(lambda *args: run(*inputs.assembled(args, working, scaling)), flops)

    def _leave(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], reason: str
    ) -> Callable[..., Any]:
        device = place_of(example_inputs) if self.absent is None else self.absent.device
        left = replace(plan_of_left(reason, device), ends_with=why_it_ends(gm))
        return counted(self._emit(gm, example_inputs, left), 0)

    def _facts(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Facts:
        target = self.absent or target_of(device_of(example_inputs), self.settings.dtype)
        originals = [self.stand_ins.original(x) for x in example_inputs]
        return Facts(
            target,
            around_now(gm, example_inputs, target.device.type, self.settings.names()),
            scaled=scale_for(originals, target.low, self.settings) is not None,
            copied=self._copied(originals, target),
            pinned=self.repairs.pins,
        )

    def _copied(self, originals: Sequence[Any], target: Target) -> dict[int, Any]:
        """The inputs that the graph may read as low copies -> the shape that a copy has already."""
        if self.mp_optimizer is False or not reads_copies(self.settings.level, target.device):
            return {}
        held = fp32_parameters(originals) if self.mp_optimizer else owned_in(originals)
        return dict.fromkeys(held) if self.absent else stored_shapes(held, originals, target.low)

    def _working_copies(
        self, planned: Planned, example_inputs: Sequence[Any], low: torch.dtype
    ) -> list[torch.Tensor]:
        """The low copies that an `MPOptimizer` would provide for the inputs that read them."""
        placeholders = planned.graph.graph.find_nodes(op="placeholder")
        copies = ((example_inputs[of], placeholders[k]) for k, of in planned.inputs.copies.items())
        return [
            memory_for(master, low, ir.value(n).shape).requires_grad_(master.requires_grad)
            for master, n in copies
        ]

    def _emit(
        self, gm: fx.GraphModule, inputs: Sequence[Any], plan: GraphPlan, facts: Facts | None = None
    ) -> Callable[..., Any]:
        found = Partitioned(gm, {node.name for node in plan.nodes})
        device = None if facts is None else facts.target.device
        run = split(gm, inputs, self.settings, found, device, is_there=self.absent is None)
        self.graphs.append(replace(plan, saved=tuple(found.saved), backward=found.backward))
        return run


def _attend_as_fused(gm: fx.GraphModule) -> None:
    """Remove attention's dropout: on a GPU the fused kernel draws the mask again from a seed, but
    the CPU's attention with dropout would store scores and mask.
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=ATTENTION):
                ir.set_operand(node, (ir.position_of(node, "dropout_p"),), 0.0)
            module.recompile()


def described(error: BaseException) -> str:
    """For example `"ValueError: the batch is empty (model.py:12)"`."""
    said = in_one_line(error)
    if isinstance(error, TorchRuntimeError) and (
        inner := re.search(r": got (\w+\(.*\))$", str(error).strip(), re.M)
    ):
        said = inner[1]  # the error that Dynamo got from an operator
    return said + place(error)


def place(error: BaseException) -> str:
    """`" (model.py:12)"`, the innermost of the user's lines that led to the error, or `""`."""
    stack = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
    frame = users_frame(frame for frame in stack if not frame.filename.startswith("<"))
    return f" ({frame.filename}:{frame.lineno})" if frame else ""
