"""The check that is made before the first compile on a torch that nobody has tested."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from run_apart import ROOT
from torch import nn

from mpcompile import MPCompileError, MPCompileWarning, cli, mpcompile
from mpcompile.torch_inside import checked, health
from mpcompile.torch_inside.failures import Failure, Health
from mpcompile.torch_inside.health import this_health
from mpcompile.torch_inside.private_names import Part

ILL = Health((Failure("a program", Part.EXPLAIN, "it differs"),), tried=7)

# In place of the check: writes a result, and a line that tells that it ran.
TEXT = repr(json.dumps(ILL.to_dict())).replace("{", "{{").replace("}", "}}")
WRITES = f"""
from pathlib import Path
Path({{args}}[-1]).write_text({TEXT}) if {{path}} else None
with open("runs", "a") as file:
    file.write("ran\\n")
"""


@pytest.fixture(autouse=True)
def untested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a new process, on a torch newer than all that were tested, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(checked.SKIP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mpcompile._torch.NEWEST", (2, 0))
    monkeypatch.setattr(checked, "NEWEST", (2, 0))
    monkeypatch.setattr(checked, "_CODE", WRITES)
    monkeypatch.setattr(health, "_known", None)


def runs() -> int:
    return len(Path("runs").read_text().splitlines()) if Path("runs").exists() else 0


def found(monkeypatch: pytest.MonkeyPatch) -> tuple[Health, list[str]]:
    """What a new process finds, and its warnings."""
    monkeypatch.setattr(health, "_known", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        known = this_health()
    return known, [str(w.message) for w in caught if w.category is MPCompileWarning]


def test_it_is_made_once_and_every_process_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        known, (said,) = found(monkeypatch)
        assert known == ILL
        assert said == (
            f"mpcompile: torch {torch.__version__} is newer than 2.0, the newest that mpcompile "
            "was tested with: explain, diagnose and plans raise (a program: it differs)"
        )
        assert this_health() is known
    assert runs() == 1


def test_the_import_makes_none_and_the_first_compile_does() -> None:
    model = nn.Linear(3, 3)
    assert runs() == 0
    with pytest.warns(MPCompileWarning, match=r"is newer than 2\.0"):
        mpcompile(model, emit="eager")
    assert runs() == 1


def test_nothing_of_the_caller_s_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with torch.no_grad(), torch.autocast("cpu"):
        found(monkeypatch)
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_tested_torch_is_not_checked_but_the_last_result_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mpcompile._torch.NEWEST", (99, 0))
    assert found(monkeypatch) == (Health(), [])
    assert runs() == 0
    checked.write(ILL, checked.path())
    said = f"mpcompile: torch {torch.__version__}: explain, diagnose and plans raise"
    assert found(monkeypatch) == (ILL, [f"{said} (a program: it differs)"])


def test_the_variable_skips_it(monkeypatch: pytest.MonkeyPatch) -> None:
    checked.write(ILL, checked.path())
    monkeypatch.setenv(checked.SKIP, "0")
    assert found(monkeypatch) == (Health(), [])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"failures": [{}]}', '{"failures": 1}'])
def test_a_damaged_result_is_made_anew(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked.path().parent.mkdir(parents=True)
    checked.path().write_text(text)
    assert found(monkeypatch)[0] == ILL
    assert runs() == 1
    assert checked.last() == ILL


@pytest.mark.parametrize("version", ["torch", "mpcompile", "python"])
def test_a_result_of_another_version_does_not_count(version: str) -> None:
    of_another = Health(**{version: "0.1"})
    checked.write(of_another, checked.path())
    assert checked.last() is None


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; sys.exit('no disk')  # {path}{args}", "exit status 1: no disk"),
        ("import os; os.kill(os.getpid(), 9)  # {path}{args}", "exit status -9: no message"),
    ],
)
def test_where_it_cannot_be_made_nothing_is_compiled(
    code: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked, "_CODE", code)
    _, (said,) = found(monkeypatch)
    assert f"it could not be made: {why}" in said
    with pytest.raises(MPCompileError, match=f"could not be made: {why}.*MPCOMPILE_CHECK=0"):
        mpcompile(nn.Linear(3, 3))
    assert checked.last() is None


@pytest.mark.parametrize("executable", ["", None, "/opt/app/blender"])
def test_another_program_than_python_is_not_started(
    executable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    known, _ = found(monkeypatch)
    assert "which is no Python" in (known.why_off(Part.COMPILE) or "")
    assert runs() == 0


def test_a_frozen_program_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert found(monkeypatch)[0].why_off(Part.COMPILE) is not None
    assert runs() == 0


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for count in (1, 2):
        assert found(monkeypatch)[0] == ILL
        assert runs() == count


def test_its_process_has_the_callers_path_but_not_what_steers_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steering = {"TORCH_LOGS": "dynamo", "TORCHDYNAMO_DISABLE": "1", "MPCOMPILE_DUMP": "x"}
    given = {**steering, "CUDA_VISIBLE_DEVICES": "3", "TORCHINDUCTOR_CACHE_DIR": "y", "HOME": "z"}
    assert checked._environment(given) == {
        "CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_CACHE_DIR": "y", "HOME": "z",
    }  # fmt: skip
    monkeypatch.setattr(sys, "path", [*sys.path, "/not there"])
    says = "import sys; sys.exit({path!r}[-1])  # {args}"
    monkeypatch.setattr(checked, "_CODE", says)
    assert "exit status 1: /not there" in (found(monkeypatch)[0].why_off(Part.COMPILE) or "")


def _in_a_rank(ready: object) -> None:
    ready.wait()  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert this_health() == ILL


def test_ranks_that_start_together_make_one() -> None:
    fork = multiprocessing.get_context("fork")
    ready = fork.Barrier(3)
    ranks = [fork.Process(target=_in_a_rank, args=(ready,)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    assert runs() == 1


def test_threads_make_one() -> None:
    ready = threading.Barrier(3)
    threads = [threading.Thread(target=_in_a_rank, args=(ready,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert runs() == 1


def test_info_tells_of_the_last_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--device", "cpu"]) == 0
    assert "mpcompile check not made for this torch" in " ".join(capsys.readouterr().out.split())
    checked.write(ILL, checked.path())
    assert cli.main(["info", "--device", "cpu"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "7 names and programs were tried, 1 failed" in out
    assert "explain, diagnose and plans raise (a program: it differs)" in out
    assert runs() == 0


PROGRAM = """
import mpcompile._torch as versions
from mpcompile.torch_inside import checked
versions.NEWEST = checked.NEWEST = (2, 0)
import torch
from mpcompile import mpcompile
model = mpcompile(torch.nn.Linear(4, 4), dtype=torch.float16, emit="eager")
model(torch.randn(3, 4)).sum().backward()
"""


@pytest.mark.sweep("the whole check, in a process of its own")
def test_a_whole_one(tmp_path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if k != checked.SKIP}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**kept, "PYTHONPATH": str(ROOT)}, cwd=tmp_path,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "`mpcompile check` found nothing wrong" in done.stderr
    (file,) = (tmp_path / "mpcompile" / "checks").glob("*.json")
    known = checked.read(file)
    assert known.failures == ()
    assert known.tried > 100
