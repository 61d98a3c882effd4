"""What is compiled of a model lives as long as the model.

torch lists the backends of a process (for `torch.compiler.reset()`), and with each what it was made
with: here a model's loss scale and plans. So torch is given one that knows ours by a weak
reference, and the compiled function holds ours. What Dynamo compiles of a function, it keeps at the
function's code, which all functions of one `def` share. Its limits, the sizes it has seen, and what
a reset drops are the code's, too. So a model's call has a code object of its own.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import random
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import MPCompileError
from .dynamo import drop_compiled, traced_code
from .modules import plain_call
from .names import cache_entries, compile_lock, dynamo_config, get_code_state
from .tracing_settings import check_set, take_back

# Dynamo compiles a function 8 times, unless it is told another limit. Training, evaluation and
# inference mode, each in fixed and in changing sizes, are six of these; each block that is
# unfrozen, and each size with dynamic=False, is another.
_THEIRS, _ENOUGH = 8, 32
_ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # not in torch 2.12

_numbers = itertools.count()

# Codes of which a graph was compiled -> the functions in whose calls that was. Beside a model's own
# code these are what runs after a break, and methods whose callers broke; these are shared.
_users: Any = WeakIdKeyDictionary()


def compiled_by(
    backend: Callable[..., Any], function: Callable[..., Any], **kwargs: Any
) -> Callable[..., Any]:
    """`torch.compile(function, backend=backend)`; the backend takes a graph and its inputs."""
    known = weakref.ref(backend)

    def theirs(gm: torch.fx.GraphModule, example_inputs: Any, **_: Any) -> Any:
        check_set()
        ours = known()
        assert ours is not None
        _compiled_for(user(), traced_code())
        compiled_graph = ours(gm, example_inputs)
        take_back()
        return compiled_graph

    # The limit is each model's, not that of a method that models share.
    own: dict[str, Any] = {"isolate_recompiles": True} if _ISOLATES else {}
    own |= {"recompile_limit": _ENOUGH} if dynamo_config.recompile_limit == _THEIRS else {}
    compiled = torch.compile(function, backend=theirs, **{**own, **kwargs})
    vars(compiled)["_mpcompile_backend"] = backend
    user = weakref.ref(compiled)
    return compiled


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method, for who must not keep its object alive: after that has gone, it returns None."""
    ref = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        living = ref()
        return None if living is None else living(*args)

    return call


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


def entry(
    function: Callable[..., Any], module: nn.Module, name: str | None = None
) -> Callable[..., Any]:
    """`function(module, ...)`, as a function with a code object of its own, of this name: Dynamo
    skips torch's own files, and keeps sizes by the name.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    return with_own_code(forward, name or f"{type(module).__name__}_{next(_numbers)}")


def shared_entry(function: Callable[..., Any], kind: type[nn.Module]) -> Callable[..., Any]:
    """`function(module, ...)` for any module of this class, with a code object of its own."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    return with_own_code(forward, f"{kind.__name__}_{next(_numbers)}")


def _compiled_for(user: Callable[..., Any] | None, code: types.CodeType | None) -> None:
    """Note that a graph of this code is compiled in a call of `user`: the graphs hold the code, at
    which they are kept, so they are dropped after the last user, when the next one is made.

    Not as it goes: it may go because its code is being reset (`torch.compiler.reset()`), and torch
    frees twice what is reset within that.
    """
    if user is not None and code is not None:
        _users.setdefault(code, weakref.WeakSet()).add(user)


def drop_unused() -> None:
    """Drop what was compiled of functions that are gone, and of those that go with it; but not
    where the user has compiled the same code.
    """
    while unused := [(code, users) for code, users in list(_users.items()) if not users]:
        for code, users in unused:
            with compile_lock:  # another thread may be compiling it, for a user of its own
                if users or _users.pop(code, None) is None:
                    continue
                backends = (getattr(e.backend, "compiler_fn", None) for e in cache_entries(code))
                if all(getattr(b, "__module__", None) == __name__ for b in backends):
                    drop_compiled(code)


# -- apart from what a user compiles of a module, and without a trace ------------------------------


def compiled_apart(
    module: nn.Module, backend: Callable[..., Any], purpose: str
) -> Callable[..., Any]:
    """The module's call, compiled for fixed sizes under a name of its own, with `purpose` in it."""
    name = f"{purpose}_{next(_numbers)}_of_{type(module).__name__}"
    own = entry(plain_call(type(module)), module, name)
    # torch 2.12 counts what the user compiles of its functions, too.
    return compiled_by(backend, own, dynamic=False, recompile_limit=1000)


def nothing_compiled(name: str) -> MPCompileError:
    """The error where Dynamo has compiled nothing of the call of a module of this class."""
    return MPCompileError(
        f"no part of {name} was compiled: torch.compile skipped its forward (an "
        "unsupported construct at the top of it, or compilation is disabled); "
        "TORCH_LOGS=graph_breaks tells why"
    )


@contextlib.contextmanager
def nothing_happened() -> Iterator[None]:
    """Restore the random states, and the sizes from which Dynamo infers which are dynamic."""
    state, numbers = random.getstate(), np.random.get_state()
    sizes = get_code_state()
    before = copy.deepcopy(sizes)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numbers)
        sizes.clear()
        sizes.update(before)
