"""Let Dynamo trace the recurrent layers of our models, and of no others.

At an `nn.RNN`, `LSTM` or `GRU` Dynamo breaks the graph unless `torch._dynamo.config.allow_rnn` is
set, which it reads while tracing. If it were always set, Dynamo would unroll the layers of other
compiled models over time. Setting it around each call costs a twentieth of a small model's step: a
setting is a context variable, and writing one empties the cache through which all of them are read.
So it is set only while something compiles: Dynamo calls back at the start and at the end of that,
in the thread that compiles.

Torch internals used here were read in torch 2.13 and exist in 2.11.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.callback import CallbackArgs, callback_handler


class _Thread(threading.local):
    calls = 0  # how many calls of our functions this thread is in

    def __init__(self) -> None:
        self.setting = contextlib.ExitStack()


_thread = _Thread()


def with_rnns(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a compiled function: what is compiled while it runs may trace recurrent layers."""

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _begin not in callback_handler.start_callbacks:  # `torch._dynamo.reset()` forgets them
            callback_handler.register_start_callback(_begin)
            callback_handler.register_end_callback(_end)
        _thread.calls += 1
        try:
            return compiled(*args, **kwargs)
        finally:
            _thread.calls -= 1

    return call


# Disabled for Dynamo: a `backward()` within a compiled function compiles the backward while Dynamo
# looks at each frame. Dynamo would compile these two as well, under the lock it calls them with.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _begin(_: CallbackArgs) -> None:
    if _thread.calls:
        _thread.setting.enter_context(torch._dynamo.config.patch(allow_rnn=True))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _end(_: CallbackArgs) -> None:
    _thread.setting.close()
