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
        if isinstance(result, torch.Tensor) and isinstance(planned, torch.Tensor):
            _check(n, result, planned)
        return result


def _check(node: fx.Node, result: torch.Tensor, planned: torch.Tensor) -> None:
    if result.dtype is not planned.dtype:
        raise CannotRewrite(f"{node.name} is {result.dtype}, and was planned as {planned.dtype}")
