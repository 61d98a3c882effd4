"""Runs a graph, and refuses to go on where a value has another dtype than the graph says."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..errors import CannotRewrite


class AsPlanned(fx.Interpreter):
    """Runs a graph node by node.

    Raises:
        CannotRewrite: a node's result has another dtype than its value in the graph. So something
            around the run, as an autocast region, changes what the passes decided.
    """

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        planned = n.meta.get("val")
        if not isinstance(result, torch.Tensor) or not isinstance(planned, torch.Tensor):
            return result
        if result.dtype is not planned.dtype:
            raise CannotRewrite(f"{n.name} is {result.dtype}, was planned as {planned.dtype}")
        return result
