"""What a trainer runs of a LightningModule: its steps, which are methods of their own.

Lightning doesn't call the module to train it, it calls `module.training_step(batch, batch_idx)`. So
each step is compiled as a call of its own, with the loss inside the graph:

    module.training_step, validation_step, test_step, predict_step   each a `StepCall`

* `self.log` ends a graph (it writes into the trainer). In a compiled step it only notes what is to
  be logged; the trainer hears of it right after the step.
* With `automatic_optimization = False` a training step calls backward and optimizers itself. That
  can't be one graph, so it runs as it is, and the submodules that it calls are compiled.
* Under DistributedDataParallel, Lightning puts the step in the place of `forward` for one call of
  the wrapper. That call is passed on.
* Copies and pickles of the module, and of the metrics in it, are plain: nothing in them is
  compiled.

Lightning isn't imported: a LightningModule is known by what it has. What is used of it was read in
lightning 2.6.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch import nn

from ..errors import MPCompileError, warn
from ..torch_inside.modules import COMPILED_CALL, compiled_call, plain_call, set_compiled_call
from ..torch_inside.tracing_settings import is_inlined

STEPS = ("training_step", "validation_step", "test_step", "predict_step")

Call = Callable[..., Any]


def has_steps(module: nn.Module) -> bool:
    """Whether a trainer runs this module by its steps: whether it is a LightningModule."""
    own = callable(getattr(module, "training_step", None))
    return own and hasattr(module, "automatic_optimization")


def compile_steps(module: Any, compiled: Callable[..., Call]) -> None:
    """Compile, in place, what a trainer runs of a LightningModule.

    Args:
        module: the module, whose compiled call is set already.
        compiled: (module, method=None) -> the compiled call of a module, or of a method, given
            unbound.
    """
    set_compiled_call(module, _Forward(module, compiled_call(module)))
    _keep_metrics_out_of_graphs(module)
    vars(module)["__getstate__"] = functools.partial(_plain_state, module)
    logs = _Logs(module)
    for name in STEPS:
        method: Any = getattr(module, name, None)
        if isinstance(method, StepCall):  # of an earlier mpcompile()
            method = method.method
        if getattr(method, "__self__", method) is not module:  # none, or not a method any more
            continue
        if name == "training_step" and not module.automatic_optimization:
            for called in _called_submodules(module):
                set_compiled_call(called, compiled(called))
            setattr(module, name, StepCall(module, name, method, method, None))
        else:
            run = compiled(module, method=_unbound(method))
            setattr(module, name, StepCall(module, name, method, run, logs))


def _unbound(method: Any) -> Call:
    """A method as a function of the module and the arguments."""
    if hasattr(method, "__func__"):
        function: Call = method.__func__
        return function
    return lambda _, *args, **kwargs: method(*args, **kwargs)  # of a functools.partialmethod


def _keep_metrics_out_of_graphs(module: nn.Module) -> None:
    """Let the torchmetrics in a module run as they are: their lists and counters would compile each
    step again.
    """
    kinds = getattr(sys.modules.get("torchmetrics"), "Metric", ())
    metrics: list[Any] = [m for m in module.modules() if isinstance(m, kinds)]
    for metric in metrics:
        if compiled_call(metric) is None:
            set_compiled_call(metric, torch.compiler.disable(plain_call(metric)))
            metric.update = torch.compiler.disable(metric.update)
            vars(metric)["__getstate__"] = functools.partial(_plain_state, metric)


def _called_submodules(module: nn.Module) -> Iterator[Any]:
    """The outermost submodules with parameters that can be called: no lists or dicts of modules."""
    for child in module.children():
        if not any(True for _ in child.parameters()):
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called_submodules(child)
        else:
            yield child


def _plain_state(module: nn.Module) -> Any:
    """What copy, deepcopy and pickle take of a LightningModule, or of a metric: all but what was
    put into it here. That is bound to this one module: a copy that had it would run, or write to,
    the original.
    """
    state = type(module).__getstate__(module)
    if not isinstance(state, dict):  # of the user's own making
        return state
    ours = ("__getstate__", COMPILED_CALL)
    state = {name: value for name, value in state.items() if name not in ours}
    steps = {name: step for name, step in state.items() if isinstance(step, StepCall)}
    if steps and get_spawning_popen() is not None:
        warn(
            f"{type(module).__name__} was compiled by mpcompile(), and is sent to another process "
            "as a plain copy, which trains in FP32. Leave mpcompile() out and use "
            "MPCompilePrecision, the plugin: it compiles in the processes that Lightning spawns "
            '(strategy="ddp_spawn")'
        )
    for name, step in steps.items():
        del state[name]
        if step.own is not None:
            state[name] = step.own
    return state


class StepCall:
    """One step of a LightningModule.

    Args:
        module: the module.
        name: of the step.
        method: the step as the user wrote it.
        run: what a call runs: the compiled method, or the method itself.
        logs: where the compiled method logs to, or None.
    """

    def __init__(
        self, module: nn.Module, name: str, method: Call, run: Call, logs: _Logs | None
    ) -> None:
        self._module, self._name, self.method = module, name, method
        self._run, self._logs = run, logs
        before = vars(module).get(name)
        # What the module itself, not its class, had of this name.
        self.own: Call | None = before.own if isinstance(before, StepCall) else before
        functools.update_wrapper(self, method)  # Lightning looks at its signature and its code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # one step that calls another
            return self.method(*args, **kwargs)
        refuse_second_precision(self._module)
        if self._logs is None:
            return self._run(*args, **kwargs)
        with self._logs:
            return self._run(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, self._name)  # the step by itself, without its module


class _Forward:
    """A call of a LightningModule itself."""

    def __init__(self, module: Any, compiled: Call) -> None:
        self._module, self._compiled = module, compiled
        self._own = vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracing = torch.compiler.is_dynamo_compiling()
        if is_inlined() if tracing else self._is_redirected():
            return plain_call(self._module)(*args, **kwargs)
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # None in a copy; for a module with a __deepcopy__ of its own

    def _is_redirected(self) -> bool:
        """Whether a step stands in the place of forward. Lightning puts a bound method back."""
        forward = vars(self._module).get("forward", self._own)
        return forward is not self._own and getattr(forward, "__self__", None) is not self._module


class _Logs:
    """While entered, what the module logs is only noted; it is logged at the end.

    Dynamo traces an append to a list, and what notes is the same function in each step: so a step
    is one graph, and is compiled once. If a step that isn't compiled calls another, they are
    entered one within the other, and all is logged when the outer one ends.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._depth = 0
        self._before: list[tuple[str, Any, Any]] = []  # noted before the step within began
        self._noted: list[tuple[str, Any, Any]] = []
        noted = self._noted

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            noted.append(("log", (name, _as_it_is(value, **kwargs), *args), kwargs))

        def log_dict(dictionary: Any, *args: Any, **kwargs: Any) -> None:
            noted.append(("log_dict", (_as_it_is(dictionary, **kwargs), *args), kwargs))

        self._instead = {"log": log, "log_dict": log_dict}

    def __enter__(self) -> None:
        self._set_aside()
        self._depth += 1
        vars(self._module).update(self._instead)

    def __exit__(self, failed: Any, *_: Any) -> None:
        self._set_aside()
        self._depth -= 1
        if self._depth:
            return
        for name in self._instead:
            vars(self._module).pop(name, None)
        noted, self._before = self._before, []
        if failed is None:
            for name, args, kwargs in noted:
                getattr(self._module, name)(*args, **kwargs)

    def _set_aside(self) -> None:
        """A compiled step begins with an empty list: for another length it is compiled again."""
        self._before += self._noted
        self._noted.clear()


def _as_it_is(value: Any, enable_graph: bool = False, **_: Any) -> Any:
    """A copy of the tensors to be logged: the step may still write to them."""
    if isinstance(value, dict):
        return {key: _as_it_is(one, enable_graph) for key, one in value.items()}
    if isinstance(value, torch.Tensor):
        return value.clone() if enable_graph else value.detach().clone()
    return value


def refuse_second_precision(module: Any) -> None:
    """Refuse autocast or a GradScaler of Lightning's around a compiled module.

    Raises:
        MPCompileError: the module's trainer has such a precision.
    """
    precision = str(getattr(getattr(module, "_trainer", None), "precision", ""))
    if precision.endswith("-mixed") or precision.startswith("transformer-engine"):
        raise MPCompileError(
            f"{type(module).__name__} was compiled by mpcompile(), and Trainer(precision="
            f"{precision!r}) adds autocast, and in FP16 a GradScaler, around it: leave precision= "
            "out. The dtype is an option of mpcompile()"
        )
