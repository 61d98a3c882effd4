"""Dynamo: its variables, its errors and settings, what it notes of a program while it traces, and
what it keeps for the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .names import (
    ConstantVariable,
    ContinueExecutionCache,
    FunctoolsPartialVariable,
    OutputGraph,
    TorchDispatchMode,
    TorchInGraphFunctionVariable,
    UnspecializedNNModuleVariable,
    UserFunctionVariable,
    builder,
    callback_handler,
    compile_lock,
    get_metrics_context,
    get_mod_inlinelist,
    graph_break,
    meta_utils,
    reset_code,
    tls,
)
from .private_names import MissingInTorch
from .replace import Replacement, Spot, method, put

if TYPE_CHECKING:
    from types import CodeType, FunctionType


class BesideDynamo(TorchDispatchMode):
    """Under any other mode Dynamo leaves frames to Python, and operators of higher order raise."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True


IS_STATIC = "get_static_address_type"
"""The function of `builder` that tells whether a tensor is marked by `mark_static_address`."""

CHECK_OUTPUTS = (
    "_validate_outputs_safe_for_autograd_nodes",
    "_check_requires_grad_intermediate_outputs",
)
"""The methods of `OutputGraph` that refuse results whose graph a backward has used up, and results
computed from a leaf that the program has made; not every release has the second.
"""


def traced_code() -> CodeType | None:
    """The code that Dynamo is tracing, inside of a backend; None outside of it.

    `reset_code` of it drops all that was compiled of it, so that its next call is traced again. The
    compiled code may be running while this happens.
    """
    translator = _translator()
    return None if translator is None else translator.f_code


def traced_output() -> OutputGraph | None:
    """Dynamo's record of what it is tracing in this thread; None if that is nothing."""
    translator = _translator()
    return None if translator is None else translator.output


def notes_on_inputs() -> list[Any]:
    """Inside of a backend, what Dynamo notes on the tensors that it traces: dictionaries with weak
    references to them, which keep `torch.utils.swap_tensors` from its work. After a compile with a
    backend of its own, torch clears these (`clear_compile_context_weakrefs`, in 2.13 and 2.14).
    """
    if (output := traced_output()) is None:
        return []
    context = output.tracing_context
    modes = (context.fake_mode, getattr(output, "_old_fake_mode", None))
    seen = [mode.fake_tensor_converter.meta_converter.describer for mode in modes if mode]
    inside = [notes for one in seen for notes in (one.lookup_tensor, one.lookup_storage)]
    return [context.tensor_to_context, *inside]


def whole_of(code: CodeType) -> CodeType:
    """The function's own code, for what Dynamo makes of it to go on with after a graph break."""
    made = ContinueExecutionCache.generated_code_metadata.get(code)
    return code if made is None else made.code


def drop_compiled(code: CodeType) -> None:
    """Drop what was compiled of this code. Torch's notes on this thread's compiles go, too: they
    hold the code of each program with a break that was ever compiled, and torch never drops them.
    """
    if not (context := get_metrics_context()).in_progress():
        context._edits.clear()
    reset_code(code)


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
    added = {file} - files
    files.update(added)
    try:
        yield
    finally:
        files.difference_update(added)


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


@contextlib.contextmanager
def safe_grad_as(wrap: Callable[[Any], Any]) -> Iterator[None]:
    """In this context, `wrap` of it replaces the function by which tracers read a tensor's `.grad`.
    Where it is missing, nothing is done.
    """
    with contextlib.ExitStack() as undo:
        for module in (builder, meta_utils):  # each reads `.grad` by a name of its own
            if (known := getattr(module, "safe_grad", None)) is not None:
                undo.callback(put(Spot(module, "safe_grad"), wrap(known)))
        yield
