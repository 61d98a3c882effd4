"""A function with a code object of its own.

What Dynamo compiles of a function, it keeps at the function's code, which all functions of one
`def` share. Its limits, the sizes it has seen, and what a reset drops are the code's, too.
"""

from __future__ import annotations

import collections
import contextlib
import types
import weakref
from collections.abc import Callable
from typing import Any

from ..torch_inside.names import reset_code

__all__ = ["drop_unused", "with_own_code"]

# Codes whose functions are gone. They can't be reset as that happens: a function may go because its
# code is being reset (`torch.compiler.reset()`), and torch frees twice what is reset within that.
_unused: collections.deque[types.CodeType] = collections.deque()


def with_own_code(function: Callable[..., Any], name: str) -> types.FunctionType:
    """A copy of a function, whose code has this name for Dynamo. What was compiled of it is dropped
    after it, when the next one is made: the graphs hold the code, at which they are kept.
    """
    drop_unused()
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=name)
    own = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    own.__kwdefaults__ = function.__kwdefaults__
    weakref.finalize(own, _unused.append, code).atexit = False
    return own


def drop_unused() -> None:
    """Drop what was compiled of functions that are gone, and of those that go with it."""
    with contextlib.suppress(IndexError):
        while True:
            reset_code(_unused.popleft())
