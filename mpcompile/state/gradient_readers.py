"""Other readers of a parameter's gradient during the backward: for them it must be FP32, unscaled.

* A hook of the user's on the parameter (`register_hook`, `register_post_accumulate_grad_hook`).
* DistributedDataParallel: it copies each gradient into FP32 buckets and averages those. It can only
  be detected while its forward runs: its reducer hooks into autograd from C++, invisibly, and takes
  part in a backward only after a forward of its own (torch 2.13; the same in 2.11).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether a hook on this parameter will be called with its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def reduced_parameters() -> Iterator[torch.Tensor]:
    """The parameters of the DistributedDataParallel whose forward is running, if one is."""
    module = DistributedDataParallel._active_ddp_module
    if module is not None:
        yield from module.module.parameters()
