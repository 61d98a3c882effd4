"""A function with a code object of its own.

What Dynamo compiles of a function, it keeps at the function's code, which all functions of one
`def` share. Its limits, the sizes it has seen, and what a reset drops are the code's, too.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from ..torch_inside.dynamo import drop_compiled

__all__ = ["compiled_for", "drop_unused", "with_own_code"]

# Codes of which a graph was compiled -> the functions in whose calls that was. Beside a model's own
# code these are what runs behind a break, and methods whose callers broke; these are shared.
_users: Any = WeakIdKeyDictionary()


def with_own_code(function: Callable[..., Any], name: str) -> types.FunctionType:
    """A copy of a function, whose code has this name for Dynamo."""
    drop_unused()
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=name)
    own = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def compiled_for(user: Callable[..., Any] | None, code: types.CodeType | None) -> None:
    """Note that a graph of this code was compiled in a call of `user`: the graphs hold the code, at
    which they are kept, so they are dropped after the last user, when the next one is made.

    Not as it goes: it may go because its code is being reset (`torch.compiler.reset()`), and torch
    frees twice what is reset within that.
    """
    if user is not None and code is not None:
        _users.setdefault(code, weakref.WeakSet()).add(user)


def drop_unused() -> None:
    """Drop what was compiled of functions that are gone, and of those that go with it."""
    while unused := [code for code, users in list(_users.items()) if not users]:
        for code in unused:
            del _users[code]
            drop_compiled(code)
