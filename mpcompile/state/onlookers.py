"""Who else reads a parameter's gradient while it is made: it must then be FP32 and true to size.

* A hook of the user's on the parameter (`register_hook`, `register_post_accumulate_grad_hook`).
* DistributedDataParallel: it copies each gradient into FP32 buckets and averages those. It is seen
  while its forward runs, and has to: its reducer hooks into autograd from C++, invisibly, and takes
  part in a backward only after a forward of its own (torch 2.13; the same in 2.11).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether a hook of somebody's will be called with the gradient of this parameter."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def reduced_parameters() -> Iterator[torch.Tensor]:
    """The parameters of the DistributedDataParallel whose forward is running, if one is."""
    module = DistributedDataParallel._active_ddp_module
    if module is not None:
        yield from module.module.parameters()
