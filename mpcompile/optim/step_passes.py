"""The passes over a traced step, by name, in the order they run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from torch import fx

from .. import logs
from ..ir.step_config import StepConfig
from ..passes.step.lift_numbers import lift_numbers
from ..passes.step.predicate_writes import predicate_writes
from ..passes.step.take_gradients import take_gradients
from ..passes.step.write_copies import write_copies
from ..plans.compile_log import Dump, trace_step

StepPass = Callable[[fx.GraphModule, StepConfig], bool]

STEP_PASSES: tuple[StepPass, ...] = (
    lift_numbers,  # first: it changes the traced step only
    take_gradients,  # from here on they are as they are stored
    predicate_writes,  # before the copies, which copy the kept values
    write_copies,
)


def run(gm: fx.GraphModule, config: StepConfig, *, traced_in: float, dump: Path | None) -> None:
    """Run every pass over a traced step, in place; if asked to, dump the graph after each."""
    record = Dump(dump, "step") if dump is not None else None
    if record:
        record.stage("traced", gm, traced_in)
    for pass_ in STEP_PASSES:
        start = time.perf_counter()
        changed = pass_(gm, config)
        spent = time.perf_counter() - start
        gm.graph.lint()
        if changed:
            logs.event(
                "passes", logging.DEBUG, "step_pass",
                "%(name)s changed the optimizer's step, in %(seconds).3f s",
                name=pass_.__name__, seconds=spent, nodes=len(gm.graph.nodes),
            )  # fmt: skip
        if record:
            record.stage(pass_.__name__, gm, spent)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    trace_step(gm)
