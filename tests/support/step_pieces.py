"""Steps of an optimizer that are cut into pieces."""

from __future__ import annotations

from typing import Any

import torch
from steps import DYNAMIC, StepStage
from torch import nn

from mpcompile import ir
from mpcompile.optim.pieces import Piece, Split, split
from mpcompile.passes.step.move_scale import move_scale

__all__ = ["adam", "cut", "params_of", "passed", "updates"]


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


def cut(*sizes: tuple[int, ...], whole: bool = False, **options: Any) -> Split:
    """The pieces of a whole step: every pass has run."""
    options = {"make": adam, "scales": (DYNAMIC,), "max_grad_norm": 1.0, **options}
    return split(passed(*sizes, **options).gm, whole=whole)


def passed(*sizes: tuple[int, ...], **options: Any) -> StepStage:
    stage = StepStage(move_scale, *sizes, **options)
    stage.run()
    stage.gm.graph.eliminate_dead_code()
    return stage


def params_of(piece: Piece) -> list[str]:
    """The parameters that the piece writes."""
    found = (n for n in piece.inputs if n.op == "placeholder")
    return [n.name for n in found if ir.slot_of(n).kind == "param"]


def updates(step: Split) -> list[Piece]:
    return [r for r in step.pieces if params_of(r)]
