"""The plan for a GPU that isn't there: `plan_for(model, inputs, device="t4")`.

Dynamo traces a copy of the model without data (`stand_ins.py`), the passes run with the facts of
the GPU's data sheet (`planner/target.py`), AOTAutograd and its partitioner split the rewritten
graphs, and there it ends: no code is generated, nothing is trained. Between two graphs the program
continues with stand-ins.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from .. import ir
from .._version import __version__
from ..api import matched_nothing
from ..backend import config_for, reason_of, rewrite
from ..calls.apart import compiled_apart, nothing_happened
from ..calls.half_inputs import widened, widens_inputs
from ..devices.cuda import AbsentGPU
from ..devices.gpus import gpu
from ..emit.emitter import emit
from ..emit.rnn_tracing import with_rnns
from ..errors import MPCompileError, MPCompileWarning, did_you_mean
from ..inspect.graph_plan import GraphPlan, plan_of_left
from ..inspect.plan import ModuleLine, Plan
from ..inspect.saved_bytes import Saved, counter
from ..ir.fakes import fake_of_fixed_size
from ..ir.inputs import FOUND, SCALE, GraphInputs
from ..planner.attention import ATTENTION
from ..planner.target import Target, target_for
from ..rules.policy import Config, Level, Policy
from ..settings import OPTIONS, Settings, check_module, documented
from ..state import copies
from .failures import described, place
from .stand_ins import StandIns

__all__ = ["plan_for"]


@documented
def plan_for(
    model: nn.Module,
    *inputs: Any,
    device: str = "h100",
    dtype: torch.dtype | str = "auto",
    level: Level | str = "O1",
    policy: Policy | None = None,
    pad: str = "auto",
    dump: str | Path | None = None,
    fuse_head: bool = False,
    recompute: bool = False,
    disable_passes: Collection[str] = (),
    mp_optimizer: bool = False,
    **kwargs: Any,
) -> Plan:
    """Plan a training forward of `model(*inputs, **kwargs)` for a GPU, on a machine without one.

    Nothing is trained. The model, its gradients and buffers, and the random states stay unchanged:
    a copy of the model without data is traced. The copy takes no memory, so the model and its
    inputs may also lie on "meta".

    Args:
        model: an nn.Module with FP32 parameters, in the mode (train or eval) to plan for.
        inputs: arguments of the model's call: tensors of any shapes; their values don't matter.
        device: the GPU: "h100", "h200", "a100", "rtx4090", "t4", "v100" or "p100".
        {plans}: as for `mpcompile()`; O1 to O3.
        mp_optimizer: whether an `MPOptimizer` will hold the parameters; matters at O2.
        **kwargs: the other arguments of the model's call.

    Returns:
        The plans of all graphs, and what they save for the backward.

    Raises:
        MPCompileError: an unknown GPU, a bad argument, a model that mpcompile refuses or that can't
            be copied, a call of the model that fails, or one that depends on values.
    """
    options = {name: value for name, value in locals().items() if name in OPTIONS}
    return plan_call(
        model, inputs, kwargs, device=device, mp_optimizer=mp_optimizer, options=options
    )


def plan_call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    device: str,
    mp_optimizer: bool = False,
    options: Mapping[str, Any],
) -> Plan:
    """`plan_for`, for models whose arguments may have the names of options."""
    sheet = gpu(device)
    settings = Settings.parse(options)
    if settings.level is Level.O0:
        raise MPCompileError("level='O0' leaves everything in FP32: there is nothing to plan")
    if not isinstance(mp_optimizer, bool):
        raise MPCompileError(f"mp_optimizer={mp_optimizer!r}: use True or False")
    if not isinstance(model, nn.Module):
        raise MPCompileError(f"plan_for({type(model).__name__}): give an nn.Module")
    _check_call(model, args, kwargs)
    planner = _Planner(settings, target_for(AbsentGPU(sheet), settings.dtype), mp_optimizer)
    stand_ins = StandIns()
    twin = stand_ins.of_module(model)
    check_module(twin, settings)
    with nothing_happened(), torch.inference_mode(False), torch.enable_grad(), stand_ins:
        _run(twin, planner, *stand_ins.of_inputs(args, kwargs))
    if not planner.graphs:
        raise MPCompileError(
            f"no part of {type(model).__name__} was compiled: torch.compile skipped its forward "
            "(an unsupported construct at the top of it, or compilation is disabled); "
            "TORCH_LOGS=graph_breaks tells why"
        )
    for complaint in matched_nothing(settings, planner.graphs):
        warnings.warn(f"mpcompile: {complaint}", MPCompileWarning, stacklevel=3)
    return Plan(
        model=type(model).__name__,
        level=settings.level.value,
        dtype=str(planner.target.low).removeprefix("torch."),
        device=str(planner.target.device),
        graphs=tuple(planner.graphs),
        modules=tuple(ModuleLine(path, type(m).__name__) for path, m in model.named_modules()),
        versions={"mpcompile": __version__, "torch": torch.__version__},
        gpu=sheet,
    )


def _check_call(model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a misspelt option, which would otherwise be taken for an argument of the model."""
    try:
        inspect.signature(model.forward).bind(*inputs, **kwargs)
    except TypeError as error:
        own = [
            name
            for name, p in inspect.signature(plan_for).parameters.items()
            if p.kind is p.KEYWORD_ONLY
        ]
        hints = (did_you_mean(name, own) for name in kwargs)
        hint = next(filter(None, hints), "")
        raise MPCompileError(f"{type(model).__name__} can't be called so: {error}{hint}") from None


def _run(twin: nn.Module, planner: _Planner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the model, so that Dynamo passes each graph to the planner."""
    name = type(twin).__name__
    run = compiled_apart(twin, planner, "plan")
    if any(isinstance(m, nn.RNNBase) for m in twin.modules()):
        run = with_rnns(run)
    if widens_inputs(twin):
        args, kwargs = widened(args, kwargs)
    try:
        run(*args, **kwargs)
    except MPCompileError:
        raise
    except Exception as error:
        inner = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
        if isinstance(inner, MPCompileError):
            raise inner from inner.__cause__
        if isinstance(inner, (DataDependentOutputException, DynamicOutputShapeException)):
            raise MPCompileError(
                f"{name} goes on with the values of a tensor ({inner.func}){place(inner)}, and a "
                "plan is made without values: plan for the modules that it is made of"
            ) from error
        raise MPCompileError(f"{name} fails on these inputs: {described(inner)}") from error


class _Planner:
    """A torch.compile backend that plans each graph, counts what it saves, and runs it on fakes.

    Attributes:
        graphs: the plan of each graph so far.
    """

    def __init__(self, settings: Settings, target: Target, mp_optimizer: bool) -> None:
        self.settings, self.target = settings, target
        self.copied = mp_optimizer and settings.level is Level.O2
        self.graphs: list[GraphPlan] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        config = self._config(example_inputs)
        try:
            graph, plan = rewrite(gm, example_inputs, config, self.settings)
        except MPCompileError:
            raise
        except Exception as error:
            left = plan_of_left(reason_of(error), self.target.device)
            return self._emit(gm, example_inputs, left, untouched=True)
        _attend_as_fused(graph)
        inputs = GraphInputs.of(graph.graph)
        working = self._working_copies(graph, inputs, example_inputs)
        scaling = []
        if inputs.scaled:
            beside = next(x for x in example_inputs if isinstance(x, torch.Tensor))
            scaling = [torch.zeros((), device=beside.device) for _ in (SCALE, FOUND)]
        fixed = [fake_of_fixed_size(copy) for copy in working]
        run = self._emit(graph, inputs.assembled(example_inputs, fixed, scaling), plan)
        return lambda *args: run(*inputs.assembled(args, working, scaling))

    def _config(self, example_inputs: Sequence[Any]) -> Config:
        masters = [
            i
            for i, x in enumerate(example_inputs)
            if self.copied and isinstance(x, nn.Parameter) and x.dtype is torch.float32
        ]
        trained = any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)
        return config_for(
            self.target,
            self.settings,
            scaled=trained and torch.is_grad_enabled() and self.target.low is torch.float16,
            copied=dict.fromkeys(masters),
        )

    def _working_copies(
        self, graph: fx.GraphModule, inputs: GraphInputs, example_inputs: Sequence[Any]
    ) -> list[torch.Tensor]:
        """The low copies that an `MPOptimizer` would provide for the inputs that read them."""
        placeholders = graph.graph.find_nodes(op="placeholder")
        working = []
        for k, of in inputs.copies.items():
            master, shape = example_inputs[of], ir.value(placeholders[k]).shape
            stored = copies.memory_for(master, self.target.low, shape)
            working.append(stored.requires_grad_(master.requires_grad))
        return working

    def _emit(
        self, gm: fx.GraphModule, inputs: Sequence[Any], plan: GraphPlan, *, untouched: bool = False
    ) -> Callable[..., Any]:
        saved: list[Saved] = []
        run = emit(
            gm, inputs, "inductor", recompute=self.settings.recompute, untouched=untouched,
            inner=counter(saved),
        )  # fmt: skip
        self.graphs.append(dataclasses.replace(plan, saved=tuple(saved)))
        return run


def _attend_as_fused(gm: fx.GraphModule) -> None:
    """Remove attention's dropout: on a GPU the fused kernel draws the mask again from a seed, but
    the CPU's attention with dropout would store scores and mask.
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=ATTENTION):
                place = ir.position_of(node, "dropout_p")
                if place < len(node.args):
                    node.update_arg(place, 0.0)
                elif node.kwargs.get("dropout_p"):
                    node.update_kwarg("dropout_p", 0.0)
            module.recompile()
