"""Other readers of a parameter's gradient during the backward: for them it must be FP32, unscaled.

These are a user's hooks on the parameter (`register_hook`, `register_post_accumulate_grad_hook`).
DistributedDataParallel is another reader, from C++: see `reductions.py`.
"""

from __future__ import annotations

import torch

from ..torch_inside.autograd import hooks_on


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether a hook on this parameter will be called with its gradient."""
    return any(hooks_on(parameter))
