"""torch.compile by a backend that lives as long as what it compiles.

torch lists the backends of a process (for `torch.compiler.reset()`), and with each what it was made
with: here a model's loss scale and plans. So torch is given one that knows ours by a weak
reference, and the compiled function holds ours.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..lower.tracing_settings import check_set, take_back
from ..torch_inside.dynamo import recompile_limit, traced_code
from .own_code import compiled_for

__all__ = ["compiled_by"]

# Dynamo compiles a function 8 times, unless it is told another limit. Training, evaluation and
# inference mode, each in fixed and in changing sizes, are six of these; each block that is
# unfrozen, and each size with dynamic=False, is another.
_LIMIT, _THEIRS, _ENOUGH = "recompile_limit", 8, 32
_KNOWN = inspect.signature(torch.compile).parameters


def compiled_by(
    backend: Callable[..., Any], function: Callable[..., Any], **kwargs: Any
) -> Callable[..., Any]:
    """`torch.compile(function, backend=backend)`; the backend takes a graph and its inputs."""
    known = weakref.ref(backend)

    def theirs(gm: torch.fx.GraphModule, example_inputs: Any, **_: Any) -> Any:
        check_set()
        ours = known()
        assert ours is not None
        compiled_graph = ours(gm, example_inputs)
        take_back()
        compiled_for(user(), traced_code())
        return compiled_graph

    if _LIMIT in _KNOWN and recompile_limit() == _THEIRS:
        kwargs = {_LIMIT: _ENOUGH, **kwargs}
    if "isolate_recompiles" in _KNOWN:  # the limit is each model's, not that of a shared method
        kwargs = {"isolate_recompiles": True, **kwargs}
    compiled = torch.compile(function, backend=theirs, **kwargs)
    vars(compiled)["_mpcompile_backend"] = backend
    user = weakref.ref(compiled)
    return compiled
