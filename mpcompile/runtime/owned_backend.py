"""torch.compile by a backend that lives as long as what it compiles.

torch lists the backends of a process (for `torch.compiler.reset()`), and with each what it was made
with: here a model's loss scale and plans. So torch is given one that knows ours by a weak
reference, and the compiled function holds ours.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..lower.tracing_settings import check_set, take_back

__all__ = ["compiled_by"]


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
        return compiled_graph

    compiled = torch.compile(function, backend=theirs, **kwargs)
    vars(compiled)["_mpcompile_backend"] = backend
    return compiled
