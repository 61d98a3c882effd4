"""Values that a compiled graph computes once: a copy that no fusion reaches across.

Inductor inlines what is computed from few values into each loop that reads it, and hands a value of
the low dtype on within a loop without its rounding. What lies in this copy's memory was rounded,
and the partitioner, which doesn't compute it again, keeps it for the backward.
"""

from __future__ import annotations

from typing import Any

import torch

_LIBRARY = torch.library.Library("mpcompile", "FRAGMENT")
_LIBRARY.define("kept(Tensor values) -> Tensor")
_LIBRARY.impl("kept", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("mpcompile::kept", torch.clone, lib=_LIBRARY)


def _backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient


torch.library.register_autograd("mpcompile::kept", _backward, lib=_LIBRARY)
