"""Dynamo while it traces: its variables, what it notes of a program, and its settings for that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .private_names import MissingInTorch, Part, attribute, private
from .replace import Replacement, Spot, method, put

if TYPE_CHECKING:
    from types import CodeType, FunctionType

    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo import graph_break
    from torch._dynamo.callback import CallbackArgs, callback_handler
    from torch._dynamo.convert_frame import compile_lock
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.symbolic_convert import tls
    from torch._dynamo.trace_rules import get_mod_inlinelist
    from torch._dynamo.variables import (
        ConstantVariable,
        TensorVariable,
        UnspecializedNNModuleVariable,
        UserFunctionVariable,
        builder,
        torch_function,
    )
    from torch._dynamo.variables.functions import FunctoolsPartialVariable
    from torch._dynamo.variables.optimizer import OptimizerVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
else:
    _EFFECTS = "notes what the traced program sets"
    reset_code = private(
        "torch._C._dynamo.eval_frame:reset_code", "drops what was compiled", Part.COMPILE
    )
    graph_break = private("torch._dynamo:graph_break", "ends a graph", Part.WHOLE_STEP)
    CallbackArgs = private(
        "torch._dynamo.callback:CallbackArgs", "says which compile begins", Part.COMPILE
    )
    callback_handler = private(
        "torch._dynamo.callback:callback_handler", "calls back as a compile begins", Part.COMPILE
    )
    compile_lock = private(
        "torch._dynamo.convert_frame:compile_lock", "is held while Dynamo compiles", Part.COMPILE
    )
    TensorifyScalarRestartAnalysis = private(
        "torch._dynamo.exc:TensorifyScalarRestartAnalysis", "traces a program anew", Part.COMPILE
    )
    OutputGraph = private("torch._dynamo.output_graph:OutputGraph", _EFFECTS, Part.WHOLE_STEP)
    SideEffects = private("torch._dynamo.side_effects:SideEffects", _EFFECTS, Part.WHOLE_STEP)
    tls = private("torch._dynamo.symbolic_convert:tls", "knows what is traced", Part.COMPILE)
    get_mod_inlinelist = private(
        "torch._dynamo.trace_rules:get_mod_inlinelist", "lists torch's own files", Part.COMPILE
    )
    TensorVariable = private(
        "torch._dynamo.variables:TensorVariable", "traces tensors", Part.WHOLE_STEP
    )
    builder = private(
        "torch._dynamo.variables:builder", "makes Dynamo's variables", Part.WHOLE_STEP
    )
    _FUNCTIONS = "traces functions of ours"
    ConstantVariable = private(
        "torch._dynamo.variables:ConstantVariable", _FUNCTIONS, Part.WHOLE_STEP
    )
    FunctoolsPartialVariable = private(
        "torch._dynamo.variables.functions:FunctoolsPartialVariable", _FUNCTIONS, Part.WHOLE_STEP
    )
    UserFunctionVariable = private(
        "torch._dynamo.variables:UserFunctionVariable", _FUNCTIONS, Part.WHOLE_STEP
    )
    UnspecializedNNModuleVariable = private(
        "torch._dynamo.variables:UnspecializedNNModuleVariable",
        "ends graphs at equal modules",
        Part.COMPILE,
    )
    torch_function = private(
        "torch._dynamo.variables:torch_function", "traces subclasses of tensors", Part.WHOLE_STEP
    )
    OptimizerVariable = private(
        "torch._dynamo.variables.optimizer:OptimizerVariable", "traces optimizers", Part.WHOLE_STEP
    )
    TorchInGraphFunctionVariable = private(
        "torch._dynamo.variables.torch:TorchInGraphFunctionVariable",
        "traces functions of torch's",
        Part.COMPILE,
    )

IS_STATIC = "get_static_address_type"
"""The function of `builder` that tells whether a tensor is marked by `mark_static_address`."""

CHECK_OUTPUTS = (
    "_validate_outputs_safe_for_autograd_nodes",
    "_check_requires_grad_intermediate_outputs",
)
"""The methods of `OutputGraph` that refuse results whose graph a backward has used up, and results
computed from a leaf that the program has made; not every release has the second.
"""

__all__ = [
    "CHECK_OUTPUTS",
    "IS_STATIC",
    "CallbackArgs",
    "OptimizerVariable",
    "OutputGraph",
    "SideEffects",
    "TensorVariable",
    "TensorifyScalarRestartAnalysis",
    "builder",
    "call_back",
    "calls_of_function",
    "calls_of_modules",
    "compile_lock",
    "compile_session",
    "graph_break",
    "inlined",
    "reset_code",
    "torch_function",
    "traced_code",
    "traced_output",
    "with_number",
]


def traced_code() -> CodeType | None:
    """The code that Dynamo is tracing, inside of a backend; None outside of it.

    `reset_code` of it drops all that was compiled of it, so that its next call is traced anew. The
    compiled code may be running while this happens.
    """
    translator = _translator()
    return None if translator is None else translator.f_code


def traced_output() -> OutputGraph | None:
    """Dynamo's record of what it is tracing in this thread; None if that is nothing."""
    translator = _translator()
    return None if translator is None else translator.output


def with_number(function: FunctionType, number: int) -> Any:
    """Dynamo's variable of `functools.partial(function, number)`, which nothing is guarded on."""
    numbers = [ConstantVariable.create(number)]
    return FunctoolsPartialVariable(UserFunctionVariable(function), numbers, {})


def calls_of_function(function: Any, ours: Callable[..., Any]) -> Replacement:
    """In place of how Dynamo traces calls of a function of torch's that it traces in a way of its
    own: `ours(theirs, variable, tx, *args, **kwargs)`.
    """

    def find() -> Callable[[Callable[[Any], Any]], Callable[[], None]]:
        handlers = TorchInGraphFunctionVariable._get_handlers()
        if function not in handlers:
            raise MissingInTorch(f"torch {torch.__version__} has no own way to trace {function}")
        return lambda wrap: put(Spot(handlers, function), wrap(handlers[function]))

    return Replacement(find, ours)


@contextlib.contextmanager
def inlined(file: str) -> Iterator[None]:
    """In this context, Dynamo traces what a program calls of this file of torch's. (Frames that it
    meets outside of a graph are left to Python all the same.)
    """
    files = get_mod_inlinelist()
    if file in files:
        yield
        return
    files.add(file)
    try:
        yield
    finally:
        files.discard(file)


def calls_of_modules(ends: Callable[[nn.Module], bool]) -> Replacement:
    """In place of how Dynamo traces calls of modules: where `ends` says so, the graph ends."""

    def call(theirs: Any, variable: Any, tx: Any, *args: Any) -> Any:
        if ends(variable.value):
            return UserFunctionVariable(graph_break).call_function(tx, [], {})
        return theirs(variable, tx, *args)

    return method(UnspecializedNNModuleVariable, "call_function", call)


def call_back(begin: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Let Dynamo call these as a compile begins and as one ends, unless it does already. It does so
    where no other compile is pending in the process, in the thread of the one that begins or ends;
    a reset of Dynamo's forgets them.
    """
    if begin not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)


@contextlib.contextmanager
def compile_session() -> Iterator[None]:
    """What is traced or compiled outside of Dynamo, such as an optimizer's step, is so in here: one
    thread at a time, Dynamo's among them, and `torch.compiler.is_compiling()` says so in all of
    them, as while Dynamo compiles (2.13). It keeps torch.optim from calling `.item()`; and up to
    torch 2.13 a thread that calls a compiled function raises while another one traces without it.

    Raises:
        MissingInTorch: there is no such switch.
    """
    with compile_lock:
        undo = put(Spot(torch.compiler, "_is_compiling_flag"), True)
        try:
            if not torch.compiler.is_compiling():
                raise MissingInTorch(f"torch {torch.__version__} has another sign of a compile")
            yield
        finally:
            undo()


def _translator() -> Any:
    return getattr(tls, "current_tx", None)  # a thread that has traced nothing has none


attribute("torch._dynamo.variables.torch_function:banned_attrs", "hides .grad", Part.WHOLE_STEP)
attribute("torch.compiler:_is_compiling_flag", "keeps numbers of a step tensors", Part.OPTIMIZER)
