"""The torch.compile backend for whole training steps."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .. import backend, ir
from ..errors import CannotRewrite
from ..optim.inputs import Setting
from ..runtime import uncalled
from ..runtime.graph_call import is_leaf
from ..scaling import hooks
from ..settings import Settings
from ..torch_inside.autograd import hooks_on
from . import one_graph
from .call import Call
from .forward import Forward
from .parts import is_training_step
from .program import Program
from .tracing import changes_settings, check_reached
from .update import Update


class WholeBackend:
    """The backend of one training step.

    Attributes:
        varying: optimizer -> its settings that were seen to change.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._thread = threading.local()
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
        if not is_training_step(gm.graph):
            forward = backend.mpcompile_backend(gm, example_inputs, options=self._options)
            return self._beginning(forward)
        hooks.register()
        uncalled.reached(example_inputs)
        request = dict(self._options)
        listener = request.pop("_listener", None)
        names = request.pop("_names", None)
        settings = Settings.parse(request)
        if names is not None:
            settings = replace(settings, names=names)
        _check(example_inputs, settings)
        program = Program(gm, example_inputs, settings, lambda o: self.varying.get(o, frozenset()))
        traced = one_graph.trace(program)
        trained = [(i, x) for i, x in enumerate(example_inputs) if is_leaf(x)]
        fresh = program.held.fresh
        stays = [isinstance(x, torch.nn.Parameter) for x in example_inputs] + [
            i not in fresh for i in range(len(program.held.tensors))
        ]
        updates = [made for made in program.made if isinstance(made, Update)]
        run = one_graph.compiled(traced, stays, settings, program.joint, updates)
        call = Call(program, traced, run, trained, self._begin)
        for made in program.made:
            if isinstance(made, Forward) and made.plan is not None and listener is not None:
                listener(made.plan)
        return call

    @property
    def began(self) -> bool:
        """Whether something compiled has begun to run in this thread since it was set to False."""
        return getattr(self._thread, "began", False)

    @began.setter
    def began(self, began: bool) -> None:
        self._thread.began = began

    def _begin(self) -> None:
        self.began = True

    def _beginning(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.began = True
            return function(*args)

        return run


def _check_graph(gm: fx.GraphModule) -> None:
    """Refuse a graph in which Dynamo may have lost a gradient.

    A parameter that it takes for a constant has a name in the graph for each place that it is read
    from, and a gradient under one of them is not seen under the others.
    """
    if changes_settings():
        raise CannotRewrite("it changes settings or state of an optimizer; do that outside")
    check_reached(is_training_step(gm.graph))
    for node in gm.graph.find_nodes(op="get_attr"):
        if is_leaf(ir.attribute(gm, node)):
            raise CannotRewrite("a parameter is a constant of the graph (mark_static_address)")


def _check(example_inputs: Sequence[Any], settings: Settings) -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        raise CannotRewrite("gradients are exchanged between processes")
    if settings.recompute:
        raise CannotRewrite("recompute=True is about a backward that is compiled apart")
    for x in example_inputs:
        if is_leaf(x) and any(hooks_on(x)):
            raise CannotRewrite("a parameter has a hook that reads its gradient")
