"""Whether a graph can be run beside the compiled one in the memory that is free."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from .. import ir
from ..devices.registry import capabilities
from .reference import ancestors

__all__ = ["part_that_fits"]

_SHARE = 0.5  # of what is free
_TIMES = 3  # a value in its dtype, and one of twice the size


def part_that_fits(
    gm: fx.GraphModule, nodes: Sequence[Any], inputs: Sequence[Any]
) -> Collection[int] | None:
    """The numbers of the nodes that can be computed once more, as estimated: the first half, fourth
    and so on of them; None: all.
    """
    free = _SHARE * _free(inputs)
    if _peak(gm, nodes) <= free:
        return None
    count = len(nodes)
    while count := count // 2:
        if _peak(gm, nodes[:count]) <= free:
            break
    return range(count)


def _peak(gm: fx.GraphModule, nodes: Sequence[Any]) -> float:
    """Bytes of values that live together at most, in both runs."""
    needed = ancestors([n for n in nodes if isinstance(n, fx.Node)])
    order = [node for node in gm.graph.nodes if node in needed and node.op != "placeholder"]
    uses = Counter(arg for node in order for arg in node.all_input_nodes)
    live = peak = 0.0
    for node in order:
        live += _bytes(node)
        peak = max(peak, live)
        for arg in node.all_input_nodes:
            uses[arg] -= 1
            if not uses[arg] and arg.op != "placeholder":
                live -= _bytes(arg)
    return _TIMES * peak


def _bytes(node: fx.Node) -> float:
    value = node.meta.get("val")
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    return sum(
        math.prod(map(ir.hint, t.shape)) * t.element_size()
        for t in tensors
        if isinstance(t, torch.Tensor)
    )


def _free(inputs: Sequence[Any]) -> float:
    """Bytes that are free where the inputs lie; without end where nobody tells."""
    first = next((x.device for x in inputs if isinstance(x, torch.Tensor)), None)
    free = capabilities(first).free_memory() if first is not None else None
    return math.inf if free is None else free
