"""The torch.compile backend for whole training steps."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    PendingUnbackedSymbolNotFound,
    free_unbacked_symbols,
)

from .. import ir
from ..compiler.backend import compile_graph
from ..errors import CannotRewrite
from ..optim.members import Setting
from ..planner.graph_plan import GraphPlan
from ..ranks.shards import is_distributed
from ..scaling import hooks, uncalled
from ..scaling.parameters import is_leaf
from ..settings import Settings, check_here
from ..torch_inside.names import DataDependentOutputException
from ..torch_inside.tensors import hooks_on
from . import one_graph
from .call import Call
from .parts import backwards_of
from .program import StepProgram
from .tracing import changes_settings, check_reached, stepped_without_gradient

# What torch raises where a number that only a tensor's value tells would have to be known.
ON_VALUES = (
    DataDependentOutputException, GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound,
)  # fmt: skip


class WholeBackend:
    """The backend of one training step.

    Args:
        settings: the user's.
        plans: takes the plan of each forward.

    Attributes:
        thread: of each thread, as `began`, whether something compiled has begun to run since that
            was set to False.
        varying: optimizer -> its settings that were seen to change.
    """

    def __init__(self, settings: Settings, plans: list[GraphPlan]) -> None:
        self._settings, self._plans = settings, plans
        self.thread = threading.local()
        self.varying: weakref.WeakKeyDictionary[Any, frozenset[Setting]] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any
    ) -> Callable[..., Any]:
        """Compile Dynamo's graph.

        Raises:
            CannotRewrite, StateAppeared: it can't be one graph.
        """
        _check_graph(gm)
        settings, plans = self._settings, self._plans
        if not backwards_of(gm.graph):
            run_alone = compile_graph(gm, example_inputs, settings=settings, plans=plans)

            def begin_and_run(*args: Any) -> Any:
                self._begin()
                return run_alone(*args)

            return begin_and_run
        check_here()
        uncalled.reached(example_inputs)
        for optimizer in stepped_without_gradient(gm.graph):
            hooks.say_no_gradient(optimizer)
        _check(example_inputs)
        try:
            program = StepProgram(gm, example_inputs, settings, self.varying)
            traced = one_graph.trace(program)
        except (CannotRewrite, *ON_VALUES) as error:
            if not isinstance(error, ON_VALUES) and not isinstance(error.__cause__, ON_VALUES):
                raise
            raise CannotRewrite(_why_on_values(gm.graph)) from error
        trained = [(i, x) for i, x in enumerate(example_inputs) if is_leaf(x)]
        fresh = program.held.fresh
        stays = [isinstance(x, torch.nn.Parameter) for x in example_inputs] + [
            i not in fresh for i in range(len(program.held.tensors))
        ]
        verify = settings.verifying()
        run = one_graph.compiled(program, traced, stays, settings, verify)
        call = Call(program, traced, run, trained, self._begin)
        plans += [replace(forward.plan, verification=verify) for forward in program.forwards]
        return call

    def _begin(self) -> None:
        self.thread.began = True


def _why_on_values(graph: fx.Graph) -> str:
    """Where the step needs a value that only a run has, and what to do instead."""
    sized = [n for n in graph.nodes if free_unbacked_symbols(n.meta.get("example_value"))]
    for node in graph.find_nodes(op="call_method", target="item") or sized:
        code = [text for text in (node.stack_trace or "").splitlines() if text.strip(" ^~")]
        at = f" (at {ir.source(node)}: {code[-1].strip()})" if code else ""
        if node.target != "item":
            return f"a result's size depends on a tensor's values{at}; do that outside of the step"
        why = f"it makes a Python number of a tensor's value{at}; return the tensor, as"
        return f"{why} loss.detach(), and call .item() on that, outside of the step"
    return "it makes a Python number of a tensor's value, or branches on it"


def _check_graph(gm: fx.GraphModule) -> None:
    """Refuse a graph in which Dynamo may have lost a gradient.

    A parameter that it takes for a constant has a name in the graph for each place that it is read
    from, and a gradient under one of them is not seen under the others.
    """
    if changes_settings():
        raise CannotRewrite("it changes settings or state of an optimizer; do that outside")
    check_reached(bool(backwards_of(gm.graph)))
    if any(is_leaf(ir.attribute(gm, node)) for node in gm.graph.find_nodes(op="get_attr")):
        raise CannotRewrite("a parameter is a constant of the graph (mark_static_address)")


def _check(example_inputs: Sequence[Any]) -> None:
    if is_distributed():
        raise CannotRewrite("gradients are exchanged between processes")
    if any(is_leaf(x) and any(hooks_on(x)) for x in example_inputs):
        raise CannotRewrite("a parameter has a hook that reads its gradient")
