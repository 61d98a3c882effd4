"""What is said once in a process: that mpcompile makes a graph no faster, or a part of it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

import torch

from .graph_plan import PlanNode
from .plan_text import shortened

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


def say_products_stay(nodes: Iterable[PlanNode]) -> None:
    """Log that matrix products of a graph stay in FP32, in bodies that no pass rewrites."""
    inside = [node for node in nodes if node.products]
    if inside:
        lines = list(dict.fromkeys(node.source or node.name for node in inside))
        _say_products_stay(sum(node.products for node in inside), shortened(lines))


@functools.cache
def _say_products_stay(count: int, where: str) -> None:
    log.warning(
        "mpcompile: %d matrix product%s in FP32 inside of calls whose bodies are not rewritten "
        "(torch.cond and its like, an autograd.Function): %s",
        count, "s stay" if count > 1 else " stays", where,
    )  # fmt: skip
