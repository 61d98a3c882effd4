"""Settings of Dynamo's for what we trace, and for nothing else.

* `allow_rnn`: at an `nn.RNN`, `LSTM` or `GRU` Dynamo breaks the graph unless it is set. If it were
  always set, Dynamo would unroll the layers of other compiled models over time.
* `allow_unspec_int_on_nn_module`: a number that a module reads and that changes, such as the step
  that a trainer has come to, becomes an input of the graph. Otherwise each value compiles it anew.

Dynamo reads a setting while it traces. Setting one around each call costs a twentieth of a small
model's step: it is a context variable, and writing one empties the cache through which all of them
are read. So they are set only while something compiles: Dynamo calls back at the start and at the
end of that, in the thread that compiles.

Torch internals used here were read in torch 2.13 and exist in 2.11.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._dynamo.callback import CallbackArgs, callback_handler


class _Thread(threading.local):
    def __init__(self) -> None:
        # by the calls of our functions that this thread is in
        self.wanted: list[list[Callable[[], AbstractContextManager[Any]]]] = []
        self.setting = contextlib.ExitStack()


_thread = _Thread()


def traced_with(
    compiled: Callable[..., Any],
    *contexts: Callable[[], AbstractContextManager[Any]],
    **settings: bool,
) -> Callable[..., Any]:
    """Wrap a compiled function: what is compiled while it runs is traced with these settings, and
    within these contexts.
    """
    wanted = [*contexts, lambda: torch._dynamo.config.patch(settings)]

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _begin not in callback_handler.start_callbacks:  # `torch._dynamo.reset()` forgets them
            callback_handler.register_start_callback(_begin)
            callback_handler.register_end_callback(_end)
        _thread.wanted.append(wanted)
        try:
            return compiled(*args, **kwargs)
        finally:
            _thread.wanted.pop()

    return call


# Disabled for Dynamo: a `backward()` within a compiled function compiles the backward while Dynamo
# looks at each frame. Dynamo would compile these two as well, under the lock it calls them with.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _begin(_: CallbackArgs) -> None:
    for contexts in _thread.wanted:
        for context in contexts:
            _thread.setting.enter_context(context())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _end(_: CallbackArgs) -> None:
    _thread.setting.close()
