"""A function with a code object of its own.

What Dynamo compiles of a function, it keeps at the function's code, which all functions of one
`def` share. Its limits, the sizes it has seen, and what a reset drops are the code's, too.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

from ..torch_inside.dynamo import reset_code

__all__ = ["with_own_code"]


def with_own_code(function: Callable[..., Any], name: str) -> types.FunctionType:
    """A copy of a function, whose code has this name for Dynamo. What was compiled of it goes with
    it: otherwise the graphs would stay, which hold the code, and at which they are kept.
    """
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=name)
    own = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    own.__kwdefaults__ = function.__kwdefaults__
    weakref.finalize(own, reset_code, code).atexit = False
    return own
