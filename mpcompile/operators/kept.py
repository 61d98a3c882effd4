"""Values that a compiled graph computes once: a copy that no fusion reaches across.

Inductor inlines what is computed from few values into each loop that reads it.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("mpcompile", "FRAGMENT")
_LIBRARY.define("kept(Tensor values) -> Tensor")
_LIBRARY.impl("kept", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("mpcompile::kept", torch.clone, lib=_LIBRARY)
