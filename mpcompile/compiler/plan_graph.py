"""Dynamo's graph -> the rewritten graph and its plan, by facts that its caller has collected.

A training asks its loss scale and its optimizers for them (`training.py`); what explains or
diagnoses a model has answers of its own. Planning asks nobody: the same graph, facts and settings
make the same plan, in any thread and beside any other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .. import operators  # noqa: F401  (registers our operators)
from ..capture import pipeline
from ..capture.capture import capture
from ..capture.pipeline import Planned
from ..capture.surroundings import Around
from ..ir.fakes import unseen
from ..ir.text import Place, places
from ..rules.policy import Config, Target
from ..settings import Settings
from ..torch_inside.names import autocast_off, compile_lock


@dataclass(frozen=True)
class Facts:
    """What a plan depends on besides the graph and the settings.

    Attributes:
        target: the device that the graph is planned for, and the low dtype.
        around: what stood around the graph when Dynamo handed it over.
        scaled: whether there is a loss scale to multiply gradients by.
        copied: the inputs (by number) whose working copy in the low dtype may be read instead ->
            the shape that the copy is stored in, or None: not stored yet.
        pinned: the operators that `repair=True` has pinned to FP32 -> the reason.
    """

    target: Target
    around: Around
    scaled: bool = False
    copied: Mapping[int, tuple[int, ...] | None] = field(default_factory=dict)
    pinned: Mapping[Place, str] = field(default_factory=dict)


def plan_graph(
    gm: fx.GraphModule, inputs: Sequence[Any], facts: Facts, settings: Settings
) -> Planned:
    """Capture Dynamo's graph and run every pass over it.

    Reads no state of the process or the thread, and changes none, nor the graph that it is given.
    It writes what was asked for: the dump, torch's trace, the log. Threads that plan at once take
    turns, by Dynamo's lock: torch.fx notes in globals of the process which node is traced or run.

    Args:
        gm: the graph that Dynamo passed to the backend.
        inputs: tensors and SymInts, one for each placeholder. They are not read: FakeTensors will
            do.
        facts: see `Facts`.
        settings: the user's.

    Raises:
        CannotRewrite: the graph can't be captured, or a pass found it unsafe to rewrite.
        SpecError: a pass broke its contract.
    """
    start, around = time.perf_counter(), facts.around
    with (
        compile_lock, unseen(around.mode), autocast_off(), torch.set_grad_enabled(around.grad)
    ):  # fmt: skip
        captured = capture(gm, inputs, around, facts.target.low)
        spent = time.perf_counter() - start
        return pipeline.run(
            captured,
            _config(captured.graph, facts, settings),
            captured_in=spent,
            dump=settings.dump,
            disabled=settings.disable_passes,
        )


def _config(captured: fx.Graph, facts: Facts, settings: Settings) -> Config:
    """What the passes over a captured graph are told: the settings and the facts."""
    pinned = facts.pinned
    where = places(captured).items() if pinned else ()
    return Config(
        **vars(facts.target),
        level=settings.level,
        policy=settings.policy,
        repaired={name: pinned[place] for name, place in where if place in pinned},
        scaled=facts.scaled,
        pad=settings.pad,
        copied=facts.copied,
        fuse_head=settings.fuse_head,
    )
