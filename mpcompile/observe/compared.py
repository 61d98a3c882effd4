"""A run of a graph that is compared with the exact one, and which of their nodes are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .. import ir
from ..ir.dtypes import HALF
from .numbers import Shares, floats_of
from .record import Record
from .watch import Watch

__all__ = ["Comparing", "gradient_units", "relative_error", "source_of_value"]


class Comparing(Watch):
    """A run that is compared with the exact one.

    Args:
        gm: the captured graph, or the rewritten one.
        record: filled by the run.
        exact: the record of the exact run, with its backward done.
        scale: the loss scale of the rewritten graph; None for the captured one.
    """

    of_leaves = True

    def __init__(
        self, gm: fx.GraphModule, record: Record, exact: Record, scale: float | None = None
    ) -> None:
        super().__init__(gm, record)
        self.exact = exact
        self.scale = scale
        self.units = gradient_units(gm.graph) if scale is not None else {}

    def saw(self, n: fx.Node, result: Any) -> None:
        super().saw(n, result)
        found, wanted = floats_of(result), self.exact.exact.get(source_of_value(n).name)
        if not found or not wanted or [x.shape for x in found] != [x.shape for x in wanted]:
            return
        self.record.errors[n.name] = relative_error(found, wanted)
        if found[0].dtype in HALF:
            self.record.shares[n.name] = Shares.of(wanted, found[0].dtype)

    def saw_gradient(self, n: fx.Node, number: int, gradient: torch.Tensor) -> None:
        super().saw_gradient(n, number, gradient)
        wanted = self.exact.exact_gradients.get((source_of_value(n).name, number))
        if wanted is None or wanted.shape != gradient.shape or gradient.is_sparse:
            return
        if not _is_whole(n):
            return
        scale = self.scale if self.scale is not None and self.units.get(n) else 1.0
        error = relative_error([gradient.double() / scale], [wanted])
        errors, name = self.record.gradient_errors, n.name
        errors[name] = max(errors.get(name, 0.0), error)
        if gradient.dtype in HALF:
            self.record.gradient_shares[name] = Shares.of([wanted], gradient.dtype, scale)
            nonzero = wanted != 0
            if total := int(nonzero.sum()):
                self.record.lost[name] = int(((gradient == 0) & nonzero).sum()) / total


def source_of_value(n: fx.Node) -> fx.Node:
    """The node of the program whose value this is: behind the casts and scaling of ours."""
    while ir.role(n) in ir.ADDED and n.all_input_nodes:
        n = n.all_input_nodes[0]
    return n


def _is_whole(n: fx.Node) -> bool:
    """Whether the gradient of this node is that of the program's value: no other cast of the value,
    and no reader of the value itself, gets a part of it.
    """
    while ir.role(n) in ir.ADDED and n.all_input_nodes:
        n = n.all_input_nodes[0]
        if len(n.users) > 1:
            return False
    return True


def gradient_units(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Whether the gradient of each value is multiplied by the loss scale (see ir/units.py)."""
    units: dict[fx.Node, bool] = {}
    for n in graph.nodes:
        if n.target is torch.ops.mpcompile.unscale_grad.default:
            units[n] = True
        elif n.target is torch.ops.mpcompile.scale_grad.default:
            units[n] = False
        elif n.op == "placeholder":
            units[n] = ir.copy_of(n) is not None
        else:
            units[n] = any(units[operand] for operand in n.all_input_nodes)
    return units


def relative_error(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """The norm of the difference over the norm of the exact values, over what is finite in both."""
    off = norm = 0.0
    for x, y in zip(found, exact, strict=True):
        x, y = x.double(), y.double()
        both = x.isfinite() & y.isfinite()
        off += float(torch.where(both, x - y, 0).square().sum())
        norm += float(torch.where(both, y, 0).square().sum())
    return (off / norm) ** 0.5 if norm else float(off > 0)
