"""The message, once in a process, that mpcompile makes a graph no faster on this device."""

from __future__ import annotations

import functools
import logging

import torch

log = logging.getLogger("mpcompile")


@functools.cache
def say_nothing_runs_low(device: str, low: torch.dtype) -> None:
    """Log that a graph's products stay in FP32 under `dtype="auto"`, and what can be done.

    `device` is the kind of device as messages name it: "CPU", "GPU".
    """
    name = str(low).removeprefix("torch.")
    log.warning(
        "mpcompile: this %s has no instructions for products in %s, so they stay in FP32, as fast "
        "as torch.compile. To save memory instead: recompute=True, or dtype=torch.%s with "
        'level="O2"; `mpcompile profile` measures what pays here',
        device, name, name,
    )  # fmt: skip
