"""The torch.compile backend: Dynamo graph -> facts -> plan -> function.

One graph in, one callable out. A graph that can't be captured or rewritten safely is compiled
unchanged, as a whole, with one warning that says why; under `strict=True` it is an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from ..capture.compile_log import log_graph, trace_plan
from ..capture.pipeline import Planned
from ..errors import CannotRewrite, MPCompileError, in_one_line, warn
from ..ir.dtypes import half_of
from ..ir.parameter_updates import is_update
from ..planner.graph_plan import O0_ASKED, GraphPlan, plan_of_left
from ..planner.target import place_of
from ..rules.policy import Level
from ..scaling import hooks, parameters, uncalled
from ..settings import Settings, check_here
from ..torch_inside import given_up
from ..torch_inside.breaks import why_it_ends
from ..torch_inside.dynamo import traced_code
from ..torch_inside.names import RestartAnalysis
from ..torch_inside.outside_products import counted
from ..torch_inside.tracing_settings import or_broken
from .graph_function import function_of, function_of_left
from .plan_graph import Facts, plan_graph
from .training import training_of


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
    request = dict(options or {})
    settings = Settings.parse({**request, **({"mode": mode} if mode else {})})
    if settings.regional:
        raise MPCompileError(
            "regional=True is for mpcompile(model); torch.compile by this backend shares what it "
            'compiles of a class: call block.compile(backend="mpcompile") for each block'
        )
    plans: list[GraphPlan] = []
    run = compile_graph(gm, example_inputs, settings=settings, plans=plans)
    hooks.look_before_steps(given_up.look)
    return _noting(run, example_inputs, request, plans[0])


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, settings: Settings, plans: list[GraphPlan]
) -> Callable[..., Any]:
    """Compile one graph. Its plan, which may say that it was left in FP32, goes to `plans`."""
    check_here()
    hooks.register()
    uncalled.reached(example_inputs)
    if settings.level is not Level.O0:
        hooks.trains(example_inputs)
        given_up.compiled(traced_code(), strict=settings.strict)
    start = time.perf_counter()
    compiled, plan = _compile_or_fall_back(gm, example_inputs, settings)
    log_graph(plan, time.perf_counter() - start)
    plans.append(replace(plan, ends_with=why_it_ends(gm)))
    return counted(compiled, plan.tensor_cores.flops)


def _noting(
    run: Callable[..., Any], inputs: Sequence[Any], request: Mapping[str, Any], plan: GraphPlan
) -> Callable[..., Any]:
    """Let `compiled_plans` find the plan by the parameters: those that it is compiled of, and of
    other models, since Dynamo calls this for all modules of a class.
    """
    parameters.note_plan(inputs, request, plan)
    at = next((i for i, x in enumerate(inputs) if isinstance(x, nn.Parameter)), None)
    if at is None:
        return run
    seen = {id(inputs[at])}

    def noted(*args: Any) -> Any:
        if id(args[at]) not in seen:
            seen.add(id(args[at]))
            parameters.note_plan(args, request, plan)
        return run(*args)

    return noted


def _compile_or_fall_back(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings
) -> tuple[Callable[..., Any], GraphPlan]:
    if (reason := why_left(gm, example_inputs, settings)) is not None:
        with or_broken(gm):
            return _leave(gm, example_inputs, settings, reason)
    try:
        with or_broken(gm):
            known = training_of(gm, example_inputs, settings)
            planned = plan_graph(gm, example_inputs, known.facts, settings)
            verify = settings.verifying()
            run = function_of(gm, planned, known, settings, verify)
            return run, replace(planned.plan, verification=verify)
    except Exception as error:
        asked = isinstance(error, MPCompileError) and not isinstance(error, CannotRewrite)
        if asked or isinstance(error, RestartAnalysis):  # RestartAnalysis: Dynamo traces once more
            raise
        reason = _reason_of(error)
        stays = "in FP32" if half_of(example_inputs) is None else "as it is"
        if settings.strict:
            raise MPCompileError(
                f"this graph can't be rewritten: {reason}. Without strict=True it would be "
                f"compiled unchanged, {stays}"
            ) from error
        warn(
            f"mpcompile left a graph {stays}: {reason}. It is compiled unchanged; pass strict=True "
            "to make this an error"
        )
        return _leave(gm, example_inputs, settings, reason)


def why_left(gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings) -> str | None:
    """Why a graph stays in FP32 whatever is in it, or None."""
    if settings.level is Level.O0:
        return O0_ASKED
    if is_update(gm, example_inputs):
        return "it updates parameters in place, as an optimizer's step does; no update is rounded"
    return None


def _leave(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings, reason: str
) -> tuple[Callable[..., Any], GraphPlan]:
    plan = plan_of_left(reason, place_of(example_inputs))
    trace_plan(plan)
    verify = settings.verifying()
    run = function_of_left(gm, example_inputs, settings, verify)
    return run, replace(plan, verification=verify)


def planned_or_why(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    facts: Callable[[], Facts],
) -> Planned | str:
    """A graph as it is planned with these facts; or why it can't be rewritten, in one line.

    Raises:
        MPCompileError: what was asked for can't be done.
    """
    try:
        return plan_graph(gm, example_inputs, facts(), settings)
    except MPCompileError:
        raise
    except Exception as error:
        return _reason_of(error)


def _reason_of(error: Exception) -> str:
    """Why a graph can't be rewritten, in one line."""
    return str(error) if isinstance(error, CannotRewrite) else in_one_line(error)
