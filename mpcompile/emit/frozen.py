"""Dynamo has to see that a parameter is frozen or thawed.

Which parameters train is part of a rewritten graph: their gradients are unscaled in it. torch 2.11
skips the guards on a module's tensors as long as the module's dictionaries are the same ones, which
freezing does not change: the old graph is called again, and the gradients of what has thawed come
out as many times too large as the scale. (Stock torch.compile goes on without training it. From
2.12 on these guards hold; the setting was read in 2.11, 2.12 and 2.13.)
"""

from __future__ import annotations

import torch

__all__ = ["see_what_trains"]


def see_what_trains() -> None:
    """Make Dynamo check every tensor; a setting of the process's, made before anything compiles."""
    if torch.__version__ < "2.12":
        torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags = False
