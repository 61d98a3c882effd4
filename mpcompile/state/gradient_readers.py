"""Other readers of a parameter's gradient during the backward: for them it must be FP32, unscaled.

These are a user's hooks on the parameter (`register_hook`, `register_post_accumulate_grad_hook`).
DistributedDataParallel is another reader, from C++: see `reductions.py`.
"""

from __future__ import annotations

import torch


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether a hook on this parameter will be called with its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
