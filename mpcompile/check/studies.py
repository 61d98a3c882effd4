"""What mpcompile says about a model, and does to one that overflows, for `mpcompile check`."""

from __future__ import annotations

import torch
from torch.optim import SGD

from ..diagnosis.diagnose import diagnose
from ..preview.explain import explain
from ..records import repairs_of
from . import models
from .sides import Results, Side

__all__ = ["diagnosed", "explained", "repaired"]

_ROWS = (8, 6)


def repaired(side: Side) -> Results:
    """The gradients of a model that overflows until an operator of it is pinned to FP32."""
    net = models.Overflowing()
    model = side.model(net)
    optimizer = SGD(net.parameters(), lr=0.0)  # what is compared is of the first weights
    x = side.random(*_ROWS)
    for _ in range(1 if side.exact else 40):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert side.exact or repairs_of(model), "nothing was repaired"
    return [p.grad for p in net.parameters() if p.grad is not None]


def explained(side: Side) -> Results:
    """How many products of a model run low: all of its two."""
    if side.exact:
        return [torch.tensor(2.0, dtype=torch.float64)]
    plan = explain(models.layers(), side.random(*_ROWS), dtype=side.dtype)
    low = [n for graph in plan.graphs for n in graph.nodes if n.precision == "LOW"]
    return [torch.tensor(float(sum("linear" in n.op for n in low)))]


def diagnosed(side: Side) -> Results:
    """The loss of a model."""
    net, x = models.layers(), side.random(*_ROWS)
    if side.exact:
        return [_loss(net.double()(x)).detach()]
    report = diagnose(net, x, loss_fn=_loss, dtype=side.dtype)
    assert not report.faults, report.faults[0]
    return [torch.tensor(report.losses["low"])]


def _loss(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()
