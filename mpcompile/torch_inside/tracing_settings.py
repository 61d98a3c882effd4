"""Settings of Dynamo's for what we trace, and for nothing else.

* `allow_rnn`: at an `nn.RNN`, `LSTM` or `GRU` Dynamo breaks the graph unless it is set. If it were
  always set, Dynamo would unroll the layers of other compiled models over time.
* `allow_unspec_int_on_nn_module`: a number that a module reads and that changes, such as a count of
  its calls, becomes an input of the graph. Otherwise each value compiles it again.
* `capture_dynamic_output_shape_ops`: operators whose result's size depends on values (`x[mask]`,
  `torch.where(mask)`) stay in the graph. At each of them Dynamo would break it; in a loop, as over
  the experts of a mixture, it would leave the whole frame to Python. Not every graph with such a
  size can be compiled: `or_broken` lets Dynamo break it after all.
* `trace_autograd_ops`, for `torch.autograd.grad(create_graph=True)` alone: what is computed from
  such a gradient needs it in the same graph (`capture/derivatives.py`). At any other gradient, and
  at a `backward()`, the graph ends, so that the compiled backward scales its gradients.
* `ignore_logger_methods`: what a library says once in a process (`Logger.warning_once`, which
  transformers adds) is left out of the graph. Otherwise its models would have a graph break there,
  for good: Dynamo doesn't know that it was said.

Dynamo reads a setting while it traces. Setting one around each call costs a twentieth of a small
model's step: it is a context variable, and writing one empties the cache through which all of them
are read. So they are set only while something compiles: Dynamo calls back at the start and at the
end of that, in the thread that compiles. Of what begins while another thread compiles it says
nothing, and of what ends only in the last of these threads. So a call at such a time is slower: the
settings are set around it, and what else is wanted makes Dynamo trace a graph twice. It stays no
longer than that: contexts may hold Dynamo's lock. Whoever gets no graph without them tries again
(`were_set`, `wait_for_others`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..errors import MPCompileError
from . import dynamo, names
from .names import CallbackArgs, RestartAnalysis, dynamo_config, pytree
from .private_names import MissingInTorch
from .replace import applied

VALUE_SIZES = {"capture_dynamic_output_shape_ops": True}


def settings_for(module: nn.Module) -> dict[str, bool]:
    """What a module's call is traced with (`traced_with`)."""
    rnns = any(isinstance(inner, nn.RNNBase) for inner in module.modules())
    return {**VALUE_SIZES, **({"allow_rnn": True} if rnns else {})}


class _SettingsThread(threading.local):
    def __init__(self) -> None:
        # by the calls of our functions that this thread is in
        self.wanted: list[list[Callable[[], AbstractContextManager[Any]]]] = []
        self.setting = contextlib.ExitStack()
        self.is_set = self.is_late = False  # late: set by `check_set`
        self.were_set = False  # in the last call


_thread = _SettingsThread()
_idle = threading.Event()  # nothing compiles in any thread, as far as Dynamo has said
_idle.set()
_notes: list[Any] = []  # of Dynamo, on the inputs of what any thread compiles

_LONGEST = 60.0  # seconds to wait for other threads, which may wait for this one


def traced_with(
    compiled: Callable[..., Any],
    *contexts: Callable[[], AbstractContextManager[Any]],
    **settings: bool,
) -> Callable[..., Any]:
    """Wrap a compiled function: what is compiled while it runs is traced with these settings, and
    within these contexts.
    """

    def set_all() -> AbstractContextManager[Any]:
        always = {"allow_unspec_int_on_nn_module": True, "ignore_logger_methods": _left_out()}
        patched: AbstractContextManager[Any] = dynamo_config.patch({**always, **settings})
        return patched

    wanted = [*contexts, set_all, _inner_calls]
    _listen()

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        _listen()  # a reset of Dynamo's forgets it
        _thread.wanted.append(wanted)
        _thread.were_set = False
        try:
            if not (_thread.is_set or _idle.is_set()):
                with set_all():
                    return compiled(*args, **kwargs)
            return compiled(*args, **kwargs)
        finally:
            _thread.wanted.pop()
            if _thread.is_set:
                _close()

    return call


def _differentiate(theirs: Any, variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Dynamo's tracing of `torch.autograd.grad`."""
    create_graph = kwargs.get("create_graph")
    inner = create_graph is not None and create_graph.as_python_constant()
    with dynamo_config.patch(trace_autograd_ops=True) if inner else contextlib.nullcontext():
        return theirs(variable, tx, *args, **kwargs)


_GRAD = dynamo.calls_of_function(torch.autograd.grad, _differentiate)


@contextlib.contextmanager
def _inner_calls() -> Iterator[None]:
    """In this context, Dynamo traces gradients that are differentiated, and checkpoint_sequential.
    No other thread compiles. Where this torch can't, the graph ends at them.
    """
    with names.compile_lock, contextlib.ExitStack() as undo:
        with contextlib.suppress(MissingInTorch):
            undo.enter_context(dynamo.inlined(torch.utils.checkpoint.__file__))
        with contextlib.suppress(MissingInTorch):
            undo.enter_context(applied(_GRAD))
        yield


def _left_out() -> set[Callable[..., Any]]:
    """Methods of loggers that are not called: the user's own, and those that say a thing once."""
    once = getattr(logging.Logger, "warning_once", None)
    return {*dynamo_config.ignore_logger_methods, *([once] if once is not None else [])}


def call_back(begin: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """As `dynamo.call_back`; after a reset of Dynamo's, again from the next call of ours on."""
    _callbacks[begin] = end
    _listen()


def _listen() -> None:
    for begin, end in list(_callbacks.items()):
        dynamo.call_back(begin, end)


def were_set() -> bool:
    """Whether something was traced with what this thread's last call wants."""
    return _thread.were_set


def wait_for_others() -> None:
    """Wait until no thread compiles, but no longer than a minute."""
    _idle.wait(_LONGEST)


def check_set() -> None:
    """See that what is being compiled was traced with the settings that its call wants: another
    thread may have begun to compile after that.

    Raises:
        RestartAnalysis: it was not; they are set now.
    """
    if _thread.wanted and not _thread.is_set:
        _enter()
        _thread.is_late = True
        raise names.TensorifyScalarRestartAnalysis()  # the one that a backend may raise


def take_back() -> None:
    """Take back what `check_set` has set: the graph is traced. When it is compiled, what Dynamo has
    noted on its inputs is forgotten.
    """
    _notes.extend(dynamo.notes_on_inputs())
    if _thread.is_late:
        _close()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_inlined() -> bool:
    """For code that Dynamo traces: whether what we have compiled becomes a part of its graph, as it
    was before: in a function of ours (`traced_with`), and where it is exported.
    """
    return bool(_thread.wanted) or torch.compiler.is_exporting()


# Disabled for Dynamo: a `backward()` within a compiled function compiles the backward while Dynamo
# looks at each frame. Dynamo would compile these two as well, under the lock it calls them with.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _begin(args: CallbackArgs) -> None:
    _idle.clear()
    # No other compile traces a program. And this one has Dynamo's lock: who waits for that in a
    # callback, of which there is one at a time, may wait for a thread that waits for its own.
    if _thread.wanted and args.callback_trigger.name == "DYNAMO":
        _enter()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _end(_: CallbackArgs) -> None:
    _idle.set()
    _close()
    while _notes:
        _notes.pop().clear()


_callbacks = {_begin: _end}


def _enter() -> None:
    _close()
    _thread.is_set = _thread.were_set = True
    for contexts in _thread.wanted:
        for context in contexts:
            _thread.setting.enter_context(context())


def _close() -> None:
    _thread.is_set = _thread.is_late = False
    _thread.setting.close()


@contextlib.contextmanager
def or_broken(gm: fx.GraphModule) -> Iterator[None]:
    """If compiling Dynamo's graph fails here, and it has sizes that depend on values, have Dynamo
    trace the program once more and break it at the operators that make them.

    The backward of such a graph is compiled at once: where that fails, too, nothing has run yet.
    """
    if not _has_value_sizes(gm.graph):
        yield
        return
    try:
        with names.aot_settings(force_non_lazy_backward_lowering=True):
            yield
    except (MPCompileError, RestartAnalysis):
        raise
    except Exception:
        wanted = dynamo_config.capture_dynamic_output_shape_ops
        if not wanted or not _thread.wanted:
            raise
        broken = dynamo_config.patch(dict.fromkeys(VALUE_SIZES, False))
        _thread.setting.enter_context(broken)
        raise names.TensorifyScalarRestartAnalysis() from None


def _has_value_sizes(graph: fx.Graph) -> bool:
    values = pytree.tree_leaves([node.meta.get("example_value") for node in graph.nodes])
    sized = (v for v in values if isinstance(v, (torch.Tensor, torch.SymInt)))
    return any(map(free_unbacked_symbols, sized))
