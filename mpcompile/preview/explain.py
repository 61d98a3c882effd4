"""What mpcompile does with a model, without doing it: `explain(model, *inputs)`.

Dynamo traces a copy of the model without data (`stand_ins.py`). Each graph is rewritten as in a
compile, and split by AOTAutograd and its partitioner into forward and backward (`planner.py`);
there it ends: no code is generated, nothing is trained. Between two graphs the program continues
with stand-ins. With `device="t4"` the passes run with the facts of that GPU's data sheet
(`planner/target.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from .._version import __version__
from ..api import matched_nothing
from ..capture.provenance import names_in
from ..capture.regions import noting_regions
from ..check_module import check_call, check_module
from ..devices.cuda import AbsentGPU
from ..devices.gpus import gpu
from ..errors import MPCompileError, MPCompileWarning
from ..lower.tracing_settings import VALUE_SIZES, traced_with
from ..planner.target import place_of, target_for, target_of
from ..plans.plan import ModuleLine, OutsideLine, Plan
from ..records import pinned_in, settings_like, studied
from ..rules.policy import Level, Policy
from ..runtime.compile_apart import compiled_apart
from ..runtime.half_inputs import widened, widens_inputs
from ..runtime.left_to_python import looked_into
from ..runtime.outside_products import aside
from ..settings import OPTIONS, documented
from ..torch_inside.dynamo_names import BackendCompilerFailed
from ..torch_inside.fakes import DataDependentOutputException, DynamicOutputShapeException
from .failures import described, place
from .leave_no_trace import no_trace
from .planner import Planner
from .stand_ins import StandIns

__all__ = ["explain", "plan_call", "plan_for"]

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
    level: Level | str | None = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    pad: str | None = None,
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
            "h200", "a100", "rtx4090", "t4", "v100" or "p100".
        {plans}: as for `mpcompile()`. None: what the model was compiled with; the default of
            `mpcompile()` if it was not. A compiled model's `dump` is not taken over.
        mp_optimizer: whether an `MPOptimizer` holds the parameters; matters at O2. None: whether
            one holds them now.
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


def plan_for(model: nn.Module, *inputs: Any, device: str = "h100", **kwargs: Any) -> Plan:
    """`explain` for a GPU that this machine need not have; takes the same arguments."""
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
    absent = None if sheet is None else target_for(AbsentGPU(sheet), settings.dtype)
    stand_ins = StandIns()
    twin = stand_ins.of_module(model)
    check_module(twin, settings)
    settings = dataclasses.replace(settings, names=names_in(twin))
    repairs = pinned_in(model)
    planner = Planner(settings, absent, stand_ins, mp_optimizer, repairs)
    given = stand_ins.of_inputs(args, kwargs)
    with torch.inference_mode(False), torch.enable_grad(), no_trace(), stand_ins:
        call = functools.partial(_run, twin, _compiled(twin, planner), *given)
        outside = looked_into(call, twin, functools.partial(_compiled, planner=planner))
    if not planner.graphs:
        raise MPCompileError(
            f"no part of {type(model).__name__} was compiled: torch.compile skipped its forward "
            "(an unsupported construct at the top of it, or compilation is disabled); "
            "TORCH_LOGS=graph_breaks tells why"
        )
    for complaint in matched_nothing(settings, planner.graphs):
        warnings.warn(f"mpcompile: {complaint}", MPCompileWarning, stacklevel=3)
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


def _compiled(twin: nn.Module, planner: Planner) -> Callable[..., Any]:
    """The model's call, compiled so that Dynamo passes each graph to the planner."""

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        planning = planner_now()
        assert planning is not None
        return planning(gm, example_inputs)

    # Dynamo keeps each backend that it was given for as long as the process runs.
    planner_now = weakref.ref(planner)
    run = noting_regions(compiled_apart(twin, backend, "plan"))
    rnns = any(isinstance(m, nn.RNNBase) for m in twin.modules())
    return traced_with(run, aside, **VALUE_SIZES, **({"allow_rnn": True} if rnns else {}))


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
