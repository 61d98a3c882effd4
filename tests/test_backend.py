"""The backend's own steps: what the passes are told, and what is told of each graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpcompile import backend, compiled_plans, mpcompile, pipeline
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


def test_a_graph_that_was_rewritten_was_not_left() -> None:
    (plan,) = compiled_plans(compiled())
    assert plan.left is None
    assert "left" not in plan.to_dict()


def test_a_graph_that_updates_parameters_says_so() -> None:
    weight = nn.Parameter(torch.ones(4))

    def update(gradient: torch.Tensor) -> None:
        with torch.no_grad():
            weight.sub_(gradient)

    run = mpcompile(update, emit="eager", strict=True)
    with torch.no_grad():
        run(torch.ones(4))
    (plan,) = compiled_plans(run)
    assert plan.left is not None
    assert plan.left.startswith("it updates parameters in place")


def test_the_plan_names_every_pass_that_changed_the_graph() -> None:
    """The one that folds checkpoints back, which comes after the plan is read, too."""
    layer = nn.Linear(4, 4)

    def program(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False)

    run = mpcompile(program, dtype=torch.float16, emit="eager", strict=True)
    run(torch.ones(2, 4)).sum().backward()
    (plan,) = compiled_plans(run)
    assert plan.changed[-1] == "outline"
    assert "linear" in {node.name for node in plan.nodes}, "the plan lists checkpointed nodes"
    (plan,) = compiled_plans(compiled())
    assert "outline" not in plan.changed


def test_a_plan_does_not_change_after_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made before the last pass, around the dict that later times went into."""
    made = []
    real = pipeline.plan_of
    monkeypatch.setattr(pipeline, "plan_of", lambda *args: made.append(real(*args)) or made[-1])
    (plan,) = compiled_plans(compiled())
    assert [*plan.seconds] == ["capture", *(p.__name__ for p in pipeline.PASSES)]
    (early,) = made
    assert early.seconds == {}
