"""A training step that is compiled as a whole, and falls back to today's pieces where it can't be.

    traced by Dynamo       forward, backward, steps: one graph of Dynamo's (`tracing.py`)
    compiled               one graph of ATen operators (`program.py`, `one_graph.py`)
    called                 `call.py`

A step that can't be traced as a whole runs in pieces for good; one warning says why. Single steps
run in pieces as well, op by op: the first one of an optimizer that makes its state there, and those
that are noted because steps were skipped. Nothing was done before the decision.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from ..errors import CannotRewrite, MPCompileError, in_one_line, warn
from ..optim.eager import op_by_op
from ..optim.shadow import StateAppeared
from ..planner.graph_plan import GraphPlan
from ..settings import Settings
from ..torch_inside.breaks import users_frame
from ..torch_inside.names import BackendCompilerFailed, FailOnRecompileLimitHit, reset_code
from ..torch_inside.owned_backend import with_own_code
from ..torch_inside.private_names import Part, why_off
from ..torch_inside.tracing_settings import wait_for_others, were_set
from .call import NotThisTime, Outdated
from .tracing import traceable_optimizers
from .whole_backend import ON_VALUES, WholeBackend

# A step that is outdated so many times in a row, each after fewer runs than this, runs in pieces.
_MOST, _OFTEN = 8, 100

_TRIES = 8  # to compile while other threads do


class TrainStep:
    """What `mpcompile(function)` returns for a function that goes backward.

    Args:
        compile_in_pieces: (function, by_operator) -> the function compiled in pieces.
        compile_by: (backend, function, what it is traced with) -> the function compiled by a
            backend, as one graph.
        settings: the user's.
        plans: takes the plan of each graph.
        called: called after the first call for which the whole is compiled.
        remake: makes another one of the same function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        compile_in_pieces: Callable[[Callable[..., Any], bool], Callable[..., Any]],
        compile_by: Callable[..., Callable[..., Any]],
        settings: Settings,
        plans: list[GraphPlan],
        called: Callable[[], None],
        remake: Callable[[], TrainStep],
    ) -> None:
        functools.update_wrapper(self, function)
        self._name = getattr(function, "__name__", type(function).__name__)
        self._pieces = compile_in_pieces(function, False)
        self._once = compile_in_pieces(_with_code_of_its_own(function), True)
        self._own = _with_code_of_its_own(function)
        self._plans = plans
        self._called: Callable[[], None] | None = called
        self._ran_once: list[GraphPlan] = []  # plans of pieces that ran only once
        self._backend = WholeBackend(settings, plans)
        self._whole = compile_by(
            self._backend, self._own, traceable_optimizers, trace_autograd_ops=True
        )
        self._off = why_off(Part.WHOLE_STEP)
        self.left: str | None = None  # why it runs in pieces for good
        self._outdated = self._runs = 0  # how often it was in a row; runs since then
        self._remake, self._bound = remake, WeakIdKeyDictionary()

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        """A method of an object, as of any function. Each object has a model and optimizers of its
        own, and so a training step of its own, which lives as long as the object.
        """
        if instance is None:
            return self
        try:
            known = self._bound.get(instance)
        except TypeError:  # it takes no weak reference: all such objects share this one
            return types.MethodType(self, instance)
        if known is None:
            known = self._bound[instance] = self._remake()
        return types.MethodType(known, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.left is not None:
            return self._pieces(*args, **kwargs)
        if self._off is not None:
            return self._leave(CannotRewrite(self._off), args, kwargs)
        tries = 0
        while True:
            self._backend.thread.began = False
            try:
                result = self._whole(*args, **kwargs)
                self._runs += 1
                self._is_compiled()
                return result
            except Outdated as outdated:
                self._outdated = self._outdated + 1 if self._runs < _OFTEN else 1
                self._runs = 0
                if self._outdated > _MOST:
                    reason = "its parameters or settings change from call to call"
                    return self._leave(CannotRewrite(reason), args, kwargs)
                for optimizer, settings in outdated.varying.items():
                    before = self._backend.varying.get(optimizer, frozenset())
                    self._backend.varying[optimizer] = before | settings
                code = _code(self._own)
                assert code is not None
                reset_code(code)
            except NotThisTime:
                result = self._run_once(args, kwargs)
                self._is_compiled()
                return result
            except Exception as error:
                if self._backend.thread.began:  # the program failed, as it does in pieces
                    raise
                if not were_set() and tries < _TRIES:  # another thread compiled at that time
                    tries += 1
                    wait_for_others()
                    continue
                cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
                if isinstance(cause, StateAppeared):
                    return self._run_once(args, kwargs)
                if isinstance(cause, MPCompileError) and not isinstance(cause, CannotRewrite):
                    raise
                return self._leave(cause, args, kwargs)

    def _run_once(self, args: Any, kwargs: Any) -> Any:
        """This step in pieces, op by op."""
        known = len(self._plans)
        with op_by_op():
            result = self._once(*args, **kwargs)
        self._ran_once += self._plans[known:]
        return result

    def _is_compiled(self) -> None:
        """The whole is compiled: its plans take the place of those of single steps."""
        for plan in self._ran_once:
            self._plans[:] = [p for p in self._plans if p is not plan]
        self._ran_once.clear()
        if self._called is not None:
            called, self._called = self._called, None
            called()

    def _leave(self, cause: Exception, args: Any, kwargs: Any) -> Any:
        """Run in pieces from now on."""
        result = self._pieces(*args, **kwargs)  # an error of the program's own comes up here
        self.left = _reason(cause)
        warn(
            f"mpcompile: {self._name} runs in pieces (forward, backward and step apart), since it "
            f"can't be compiled as a whole: {self.left}"
        )
        return result


def goes_backward(function: Callable[..., Any]) -> bool:
    """Whether the code of a function names a method `backward`."""
    code = _code(function)
    return code is not None and "backward" in code.co_names


def _code(function: Callable[..., Any]) -> types.CodeType | None:
    """The code that a call of a function, a method, a partial or a callable object runs."""
    if isinstance(function, functools.partial):
        return _code(function.func)
    if isinstance(function, (types.FunctionType, types.MethodType)):
        return function.__code__
    call = getattr(type(function), "__call__", None)  # noqa: B004  (its function, not whether)
    return call.__code__ if isinstance(call, types.FunctionType) else None


def _with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own, for which Dynamo keeps what it compiles."""
    if isinstance(function, functools.partial):
        own = _with_code_of_its_own(function.func)
        return functools.partial(own, *function.args, **function.keywords)
    if isinstance(function, types.MethodType):
        return types.MethodType(_with_code_of_its_own(function.__func__), function.__self__)
    if not isinstance(function, types.FunctionType):
        return types.MethodType(_with_code_of_its_own(type(function).__call__), function)
    return with_own_code(function, function.__code__.co_name)


def _reason(error: Exception) -> str:
    """Why, in one line."""
    if isinstance(error, CannotRewrite):
        return str(error)
    if isinstance(error.__cause__ or error, ON_VALUES):
        return f"it makes a number or a size of a tensor's value, or branches on it{_place(error)}"
    if isinstance(error, FailOnRecompileLimitHit):
        return (
            "it differs from call to call, more often than torch compiles it again "
            "(torch._dynamo.config.recompile_limit, as it is when you compile the step)"
        )
    return f"{in_one_line(error)}{_place(error)}"


def _place(error: Exception) -> str:
    """The line of the user's program that Dynamo stopped at, or nothing if it doesn't tell.

    Dynamo's errors carry the frames that it was tracing, the innermost last.
    """
    frame = users_frame(getattr(error, "real_stack", None) or ())
    if frame is None:
        return ""
    at = f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return f" (at {at}); do that outside of the step"
