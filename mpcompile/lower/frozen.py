"""Make Dynamo notice that a parameter is frozen or thawed.

A rewritten graph depends on which parameters train: it unscales their gradients. torch 2.11 skips
the guards on a module's tensors while the module's dictionaries are the same objects. Freezing a
parameter keeps them the same, so the old graph would be called again, and the gradients of thawed
parameters would come out still multiplied by the scale. (Stock torch.compile goes on without
training them. From 2.12 on these guards hold; the setting was read in 2.11, 2.12 and 2.13.)
"""

from __future__ import annotations

import torch

from ..torch_inside.dynamo_names import guard_every_tensor

__all__ = ["see_what_trains"]


def see_what_trains() -> None:
    """Make Dynamo check every tensor: a setting of the process, made before anything compiles."""
    if torch.__version__ < "2.12":
        guard_every_tensor()
