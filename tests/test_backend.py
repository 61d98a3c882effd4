"""The backend's own steps: what the passes are told, and what is told of each graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from mpcompile import backend, compiled_plans, mpcompile
from mpcompile.rules.policy import Config


def compiled(**options: Any) -> nn.Module:
    model = mpcompile(nn.Linear(4, 4), dtype=torch.float16, emit="eager", strict=True, **options)
    model(torch.ones(2, 4)).sum().backward()
    return model


def test_what_the_passes_are_told_can_be_changed() -> None:
    """As on a GPU, while the graph runs here; and only inside."""

    def on_a_gpu(config: Config) -> Config:
        return dataclasses.replace(config, device=torch.device("cuda"))

    with backend.adjusted(on_a_gpu):
        (plan,) = compiled_plans(compiled())
    assert plan.device == "cuda"
    (plan,) = compiled_plans(compiled())
    assert plan.device == "cpu"
