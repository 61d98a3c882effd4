"""Models that are trained on a GPU that exists by name and planned for without one; and a plan line
by line, to be compared to the letter.
"""

from typing import Any

import torch
from torch import nn

from mpcompile.demo.gpt import GPT, GPTConfig
from mpcompile.planner.graph_plan import GraphPlan


def mlp() -> tuple[nn.Module, Any]:
    """Large, and of odd sizes."""
    net = nn.Sequential(nn.Linear(1023, 4096), nn.GELU(), nn.LayerNorm(4096), nn.Linear(4096, 1001))
    return net, lambda: (torch.randn(4095, 1023),)


def gpt() -> tuple[nn.Module, Any]:
    net = GPT(GPTConfig(vocab=1003, width=768, layers=1, heads=6))
    return net, lambda: (torch.randint(0, 1003, (16, 128)), torch.randint(0, 1003, (16, 128)))


def conv() -> tuple[nn.Module, Any]:
    net = nn.Sequential(
        nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(128, 130, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(130, 10),
    )  # fmt: skip
    return net, lambda: (torch.randn(64, 64, 56, 56),)


MODELS = {build.__name__: build for build in (mlp, gpt, conv)}


def lines_of(plan: GraphPlan) -> list[str]:
    """Every node, cast, pad, reason and product of a graph."""
    nodes = (f"{n.name}: {n.planned} {n.precision} {n.reason} ({n.module})" for n in plan.nodes)
    return [plan.head(), *nodes, *str(plan.tensor_cores).splitlines()]
