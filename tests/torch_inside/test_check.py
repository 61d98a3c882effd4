"""`mpcompile check`: what is right on this torch passes, and what is made wrong is seen."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mpcompile import cli, graph_function
from mpcompile.check import run, steps
from mpcompile.check.programs import PROGRAMS, Program
from mpcompile.check.sides import Side, error_between
from mpcompile.torch_inside import checked
from mpcompile.torch_inside.failures import Failure, Health
from mpcompile.torch_inside.health import this_health
from mpcompile.torch_inside.private_names import NAMES, Name, Part

BY_NAME = {program.about: program for program in PROGRAMS}


@pytest.mark.slow_rows("compiles by Inductor, or in processes of their own")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("about", BY_NAME)
def test_a_program_is_right(about: str) -> None:
    assert run.tried(BY_NAME[about]) is None


def test_every_part_has_a_program() -> None:
    assert {program.part for program in PROGRAMS} == set(Part) - {
        Part.CALLS,
        Part.SAY,
    }  # no numbers change


# -- a fault is seen -------------------------------------------------------------------------------


def off_by_a_tenth(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose results in a floating dtype are too large."""

    def call(*args: Any) -> Any:
        return [x * 1.1 if torch.is_floating_point(x) else x for x in compiled(*args)]

    return call


# Where what the backend emits is what trains.
EMITTED = [
    about for about, program in BY_NAME.items()
    if program.part in (Part.COMPILE, Part.RECURRENT, Part.INDUCTOR, Part.RANKS)
]  # fmt: skip


@pytest.mark.slow("compiles by Inductor, or in processes of their own")
@pytest.mark.sampled(5)
@pytest.mark.parametrize("about", EMITTED)
def test_graphs_that_are_emitted_wrong_are_seen(
    about: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, emit = BY_NAME[about], graph_function._emit
    monkeypatch.setattr(
        graph_function, "_emit", lambda *args, **more: off_by_a_tenth(emit(*args, **more))
    )
    failure = run.tried(program)
    assert failure is not None
    assert failure.part is program.part
    assert failure.why.startswith("differs from FP64 by 0.")


@pytest.mark.slow("compiles by Inductor, or in processes of their own")
@pytest.mark.parametrize("about", ["a whole step", "a whole step that sets its lr"])
def test_a_whole_step_that_goes_on_with_its_first_lr_is_seen(
    about: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = steps._whole

    def with_another_lr(side: Side, before_step: Any) -> Any:
        return whole(side, before_step if side.exact else forgetful(before_step))

    def forgetful(before_step: Any) -> Any:
        def step(optimizer: torch.optim.Optimizer) -> None:
            before_step(optimizer)
            for group in optimizer.param_groups:
                group["lr"] = 0.2

        return step

    monkeypatch.setattr(steps, "_whole", with_another_lr)
    failure = run.tried(BY_NAME[about])
    assert failure is not None
    assert failure.part is Part.WHOLE_STEP


@pytest.mark.parametrize("about", ["a step that is skipped", "MPOptimizer, a step that is skipped"])
def test_a_step_that_is_not_skipped_is_seen(about: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_BEYOND", 2.0)
    failure = run.tried(BY_NAME[about])
    assert failure == Failure(about, BY_NAME[about].part, "AssertionError: the step was taken")


def test_a_training_that_mpcompile_leaves_in_fp32_is_seen() -> None:
    program = Program("nothing", Part.COMPILE, steps.method, options={"level": "O0"})
    failure = run.tried(program)
    assert failure == Failure("nothing", Part.COMPILE, "nothing ran in the low dtype")


def test_a_repair_that_does_not_come_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpcompile.scaling.skips_in_a_row.Trouble._may_look", lambda self: False)
    failure = run.tried(BY_NAME["repair=True"])
    assert failure == Failure("repair=True", Part.WATCH, "AssertionError: nothing was repaired")


@pytest.mark.slow("compiles by Inductor, or in processes of their own")
def test_a_warning_alone_switches_nothing_off() -> None:
    program = BY_NAME["a whole step that sets its lr"]
    loud = Program(program.about, program.part, program.run)
    assert run.tried(program) is None
    failure = run.tried(loud)
    assert failure is not None
    assert failure.part is None
    assert failure.why.startswith("mpcompile: step runs in pieces")


def test_error_between() -> None:
    one = torch.tensor([3.0, 4.0])
    assert error_between([one], [one.double()]) == 0
    assert error_between([one], [torch.tensor([3.0, 5.0]).double()]) == pytest.approx(0.2)
    assert error_between([one / 0], [one.double()]) == float("inf")
    for low in ([], [one[:1]]):
        with pytest.raises((AssertionError, ValueError)):
            error_between(low, [one.double()])


def test_a_name_that_is_not_what_it_was_is_named() -> None:
    def changed() -> None:
        raise TypeError("takes one argument\nmore")

    assert run._tried_name(Name("torch.x:y", "does z", Part.SAY, lambda: None)) is None
    failure = run._tried_name(Name("torch.x:y", "does z", Part.SAY, changed))
    assert failure == Failure("torch.x.y", Part.SAY, "TypeError: takes one argument")


# -- the command -----------------------------------------------------------------------------------

RIGHT = Program("right", Part.WATCH, lambda side: [torch.ones(1, dtype=torch.float64)])
WRONG = Program("wrong", Part.WATCH, lambda side: [torch.tensor([1.0 if side.exact else 1.5])])


def test_all_is_tried_whatever_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known = []

    def noting(side: Side) -> Any:
        known.append(this_health())
        return RIGHT.run(side)

    watching = Program("known", Part.WATCH, noting)
    monkeypatch.setattr(run, "PROGRAMS", (watching, WRONG))
    said: list[str] = []
    health = run.check(said.append)
    assert health.failures == (
        Failure("wrong", Part.WATCH, "differs from FP64 by 0.5; 0.02 is what rounding may do"),
    )
    assert health.tried == len(NAMES) + 2
    assert said == ["private names of torch", "known", "wrong"]
    assert known == [Health(), Health()]


@pytest.mark.parametrize("program", [RIGHT, WRONG], ids=["right", "wrong"])
def test_the_command(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(run, "PROGRAMS", (program,))
    assert cli.main(["check"]) == (program is WRONG)
    lines = capsys.readouterr().out.splitlines()
    failed = "1" if program is WRONG else "nothing"
    count = len(NAMES) + 1
    verdict = f"torch {torch.__version__}: {count} names and programs were tried, {failed} failed"
    assert lines.pop() == verdict
    assert [re.sub(": .*->", " ->", line) for line in lines] == (
        [f"wrong -> {Part.WATCH.value}"] if program is WRONG else []
    )
    assert Health.of(json.loads(checked.path().read_text())) == checked.last()
    assert checked.path().is_relative_to(tmp_path)


def test_a_result_that_cannot_be_kept_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "PROGRAMS", ())
    (tmp_path / "file").touch()
    assert cli.main(["check", "--out", str(tmp_path / "file" / "check.json")]) == 0
    assert "this is not remembered" in capsys.readouterr().out
