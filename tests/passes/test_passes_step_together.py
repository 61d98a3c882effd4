"""The step passes together: the notes they leave for each other, and all that a step writes."""

from __future__ import annotations

import pytest
import torch
from steps import DYNAMIC, LOW, StepStage, adam
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.step import CopyLayout, Ranks, StepNotes
from mpcompile.optim.pipeline import STEP_PASSES, StepPass
from mpcompile.passes.step.agree_on_ranks import agree_on_ranks
from mpcompile.passes.step.check_gradients import check_gradients
from mpcompile.passes.step.clip_gradients import clip_gradients
from mpcompile.passes.step.find_overflows import find_overflows
from mpcompile.passes.step.lift_numbers import lift_numbers
from mpcompile.passes.step.measure_gradients import measure_gradients
from mpcompile.passes.step.move_scale import move_scale
from mpcompile.passes.step.predicate_writes import predicate_writes

# -- what passes leave for each other ---------------------------------------------------------


@pytest.mark.parametrize(
    ("pass_", "missing", "maker"),
    [
        (measure_gradients, "start", "widen_gradients"),
        (find_overflows, "start", "widen_gradients"),
        (agree_on_ranks, "overflows", "find_overflows"),
        (check_gradients, "overflows", "find_overflows"),
        (clip_gradients, "total", "measure_gradients"),
        (predicate_writes, "skip", "check_gradients"),
        (move_scale, "overflows", "find_overflows"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_pass_that_runs_too_early_says_what_must_run_before(
    pass_: StepPass, missing: str, maker: str
) -> None:
    stage = StepStage(lift_numbers, max_grad_norm=1.0, ranks=Ranks(("0",), "cpu"))
    with pytest.raises(RuntimeError, match=f"noted '{missing}'.*: {maker} makes it"):
        pass_(stage.gm, stage.config)


@pytest.mark.parametrize(
    ("pass_", "missing"),
    [(find_overflows, "norms"), (clip_gradients, "total")],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_norms_are_needed_before_they_are_read(pass_: StepPass, missing: str) -> None:
    stage = StepStage(measure_gradients, max_grad_norm=1.0)  # every pass before that one has run
    with pytest.raises(RuntimeError, match=f"noted '{missing}'.*: measure_gradients makes it"):
        pass_(stage.gm, stage.config)


def test_every_note_names_a_pass_that_makes_it() -> None:
    """The one named, and no other."""
    made: dict[str, str] = {}
    stage = StepStage(lift_numbers, gradients=(LOW,), max_grad_norm=1.0)
    for pass_ in STEP_PASSES:
        pass_(stage.gm, stage.config)
        for name in vars(ir.step_notes(stage.gm)):
            made.setdefault(name, pass_.__name__)
    declared = {
        name: note.maker for name, note in vars(StepNotes).items() if hasattr(note, "maker")
    }
    assert made == declared


# -- all of them ------------------------------------------------------------------------------


def test_every_write_of_a_whole_step() -> None:
    copies = (CopyLayout(torch.float16, (1,)),)
    stage = StepStage(move_scale, make=adam, gradients=(LOW,), copies=copies,
                      scales=(DYNAMIC,), max_grad_norm=1.0)  # fmt: skip
    stage.run()
    written = [n.args[0].name for n in _writes(stage.gm.graph)]
    assert sorted(written) == [
        "copy0", "param0", "result_norm", "result_skipped", "scale0_floor", "scale0_good_steps",
        "scale0_hit", "scale0_overflows_left", "scale0_scale", "scale0_skipped_steps",
        "state0_exp_avg", "state0_exp_avg_sq", "state0_step",
    ]  # fmt: skip


def _writes(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=aten.copy_.default))
