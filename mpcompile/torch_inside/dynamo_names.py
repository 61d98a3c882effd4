"""Dynamo's errors and settings, and what it keeps for the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from .private_names import Part, attribute, private
from .replace import Spot, put

if TYPE_CHECKING:
    from torch._dynamo import config
    from torch._dynamo.eval_frame import cached_backends
    from torch._dynamo.exc import (
        BackendCompilerFailed,
        FailOnRecompileLimitHit,
        RestartAnalysis,
        TorchRuntimeError,
    )
    from torch._dynamo.pgo import get_code_state
    from torch._dynamo.utils import counters, get_compilation_metrics
    from torch._logging._internal import trace_structured
else:
    config = private("torch._dynamo:config", "holds Dynamo's settings", Part.COMPILE)
    cached_backends = private(
        "torch._dynamo.eval_frame:cached_backends", "lists the backends of a process", Part.EXPLAIN
    )
    _ERRORS = "torch._dynamo.exc"
    BackendCompilerFailed = private(
        f"{_ERRORS}:BackendCompilerFailed", "wraps an error of a backend's", Part.COMPILE
    )
    FailOnRecompileLimitHit = private(
        f"{_ERRORS}:FailOnRecompileLimitHit", "says that a step is never the same", Part.WHOLE_STEP
    )
    RestartAnalysis = private(
        f"{_ERRORS}:RestartAnalysis", "lets Dynamo trace a frame anew", Part.COMPILE
    )
    TorchRuntimeError = private(
        f"{_ERRORS}:TorchRuntimeError", "wraps an error of the model's", Part.EXPLAIN
    )
    get_code_state = private(
        "torch._dynamo.pgo:get_code_state", "knows which sizes are dynamic", Part.EXPLAIN
    )
    counters = private("torch._dynamo.utils:counters", "counts what Dynamo did", Part.EXPLAIN)
    get_compilation_metrics = private(
        "torch._dynamo.utils:get_compilation_metrics", "tells what was compiled why", Part.SAY
    )
    trace_structured = private(
        "torch._logging._internal:trace_structured", "writes into torch's trace", Part.SAY
    )

# These two modules each read `.grad` of what they make a fake of by a name of their own.
_builder = private("torch._dynamo.variables:builder", "makes Dynamo's variables", Part.OPTIMIZER)
_meta_utils = private("torch._subclasses:meta_utils", "makes fakes of tensors", Part.OPTIMIZER)

__all__ = [
    "BackendCompilerFailed",
    "FailOnRecompileLimitHit",
    "RestartAnalysis",
    "TorchRuntimeError",
    "cached_backends",
    "config",
    "counters",
    "get_code_state",
    "get_compilation_metrics",
    "no_recompile_limit",
    "recompile_limit",
    "safe_grad_as",
    "trace_structured",
]


def recompile_limit() -> int:
    """How often Dynamo compiles one function."""
    return config.recompile_limit


def no_recompile_limit() -> AbstractContextManager[Any]:
    """A context in which Dynamo compiles a function as often as it is asked to."""
    limits: AbstractContextManager[Any] = config.patch(
        recompile_limit=1000, accumulated_recompile_limit=1000
    )
    return limits


@contextmanager
def safe_grad_as(wrap: Callable[[Any], Any]) -> Iterator[None]:
    """In this context, `wrap` of it replaces the function by which tracers read a tensor's `.grad`.
    Where it is missing, nothing is done.
    """
    with ExitStack() as undo:
        for module in (_builder, _meta_utils):
            if (known := getattr(module, "safe_grad", None)) is not None:
                undo.callback(put(Spot(module, "safe_grad"), wrap(known)))
        yield


attribute("torch._dynamo.config:recompile_limit", "limits how often Dynamo compiles", Part.EXPLAIN)
attribute(
    "torch._dynamo.variables.builder:safe_grad", "reads a gradient to trace it", Part.OPTIMIZER
)
