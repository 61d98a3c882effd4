"""`make gpu`: the runner on pieces of the tests' own, the list, and what a GPU by name can show."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpus_by_name import needs_a_cpu_build
from repository import ROOT

from benchmarks.__main__ import devices, registry
from benchmarks.gpu import packages, runner
from benchmarks.gpu.__main__ import LONGEST, MODELS, PIECES, main
from benchmarks.gpu.runner import FAILED, KILLED, NOT_RUN, PASSED, Piece, Record
from benchmarks.real_models import BY_DEVICE


def script(name: str, code: str, limit: float = 20.0) -> Piece:
    return Piece(name, ("-c", code), limit)


def passing(name: str, limit: float = 20.0) -> Piece:
    return script(name, "print('fine')", limit)


def statuses(records: list[Record]) -> dict[str, str]:
    return {record.name: record.status for record in records}


# -- the runner ------------------------------------------------------------------------------------


def test_what_a_piece_leaves(tmp_path: Path) -> None:
    writes = "import pathlib, sys; pathlib.Path(sys.argv[1], 'found.json').write_text('1')"
    naps = "import time; time.sleep(0.1)"  # a record's seconds are tenths
    piece = Piece("writes", ("-c", f"{writes}; print('done'); {naps}", "{out}"), 20.0)
    (record,) = runner.run([piece], tmp_path, versions={"torch": "2"})
    assert (record.status, record.exit, record.versions) == (PASSED, 0, {"torch": "2"})
    assert 0 < record.seconds < 20
    assert (tmp_path / "writes" / "found.json").read_text() == "1"
    assert (tmp_path / "writes" / "log.txt").read_text() == "done\n"
    assert json.loads((tmp_path / "writes" / "record.json").read_text())["status"] == PASSED


def test_a_failure_stops_nothing(tmp_path: Path) -> None:
    records = runner.run([script("bad", "raise SystemExit(3)"), passing("good")], tmp_path)
    assert statuses(records) == {"bad": FAILED, "good": PASSED}
    assert records[0].exit == 3


def test_the_environment_of_a_piece(tmp_path: Path) -> None:
    piece = script("says", "import os; print(os.environ['COLOUR'], 'PATH' in os.environ)")
    runner.run([piece], tmp_path, environment={"COLOUR": "green"})
    assert (tmp_path / "says" / "log.txt").read_text() == "green True\n"


SLEEPER = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True)"


def gone(process: int) -> bool:
    """Ended: no such process, or one whose parent has yet to hear of it."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.slow("a benchmark's own test, which runs it small")
def test_a_piece_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    limit = 3.0  # by then it must have started both, on a busy machine too
    start = time.monotonic()
    (record,) = runner.run([script("hangs", f"{SLEEPER}; p.wait()", limit=limit)], tmp_path)
    assert record.status == KILLED
    assert time.monotonic() - start < limit + runner.GRACE
    first, *rest = (tmp_path / "hangs" / "log.txt").read_text().splitlines()
    assert wait_for(lambda: gone(int(first)))
    assert rest[-1] == "KeyboardInterrupt", "it says where it was"


@pytest.mark.slow("a benchmark's own test, which runs it small")
def test_a_piece_is_interrupted_from_a_job_in_the_background(tmp_path: Path) -> None:
    """A shell starts such a job with interrupts ignored, and what it starts inherits that."""
    naps = "import time; time.sleep(60)"
    code = f"""
from pathlib import Path
from benchmarks.gpu import runner
runner.run([runner.Piece("naps", ("-c", {naps!r}), 3.0)], Path({str(tmp_path)!r}))
"""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        job = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGINT, before)
    assert job.wait(30.0) == 0
    log = (tmp_path / "naps" / "log.txt").read_text().splitlines()
    assert log[-1] == "KeyboardInterrupt"


@pytest.mark.slow("a benchmark's own test, which runs it small")
def test_a_piece_that_hears_no_interrupt_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "GRACE", 0.5)
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    (record,) = runner.run([script("deaf", deaf, limit=1.0)], tmp_path)
    assert (record.status, record.exit) == (KILLED, -signal.SIGKILL)


def test_workers_that_a_piece_leaves_behind_are_ended(tmp_path: Path) -> None:
    (record,) = runner.run([script("leaves", SLEEPER)], tmp_path)
    assert record.status == PASSED
    assert wait_for(lambda: gone(int((tmp_path / "leaves" / "log.txt").read_text())))


def test_a_second_call_goes_on(tmp_path: Path) -> None:
    """What failed is tried again, after what was never tried; what has passed is not."""
    tries = tmp_path / "tries"
    count = f"import pathlib; open({str(tries)!r}, 'a').write('{{}} ');"
    first = script("first", count.format("first"))
    fixed = f"raise SystemExit(not pathlib.Path({str(tmp_path / 'mended')!r}).exists())"
    second = script("second", f"{count.format('second')} {fixed}")
    out = tmp_path / "out"
    assert statuses(runner.run([first, second], out)) == {"first": PASSED, "second": FAILED}
    (tmp_path / "mended").touch()
    third = script("third", count.format("third"))
    again = runner.run([first, second, third], out)
    assert statuses(again) == {"first": PASSED, "second": PASSED, "third": PASSED}
    assert tries.read_text().split() == ["first", "second", "third", "second"]


def test_what_was_broken_off_is_run_again(tmp_path: Path) -> None:
    (tmp_path / "piece").mkdir()
    (tmp_path / "piece" / "log.txt").write_text("half a\n")
    piece = passing("piece")
    assert runner.read(piece, tmp_path).status == NOT_RUN
    assert statuses(runner.run([piece], tmp_path)) == {"piece": PASSED}
    assert (tmp_path / "piece" / "log.txt").read_text() == "fine\n"


def test_nothing_is_started_that_might_not_end_in_time(tmp_path: Path) -> None:
    said: list[str] = []
    pieces = [passing("long", limit=100.0), passing("short", limit=5.0)]
    records = runner.run(pieces, tmp_path, seconds=60.0, say=said.append)
    assert statuses(records) == {"long": NOT_RUN, "short": PASSED}
    assert said[0].startswith("long: may take 100 s, ")
    assert not (tmp_path / "long").exists()


def test_each_record_is_on_disk_when_it_is_told(tmp_path: Path) -> None:
    pieces = [passing("one"), passing("two")]
    known: list[list[str]] = []

    def note(_: Record) -> None:
        known.append([runner.read(piece, tmp_path).status for piece in pieces])

    runner.run(pieces, tmp_path, after=note)
    assert known == [[PASSED, NOT_RUN], [PASSED, PASSED]]


# -- the summary -----------------------------------------------------------------------------------


def test_the_summary_and_the_archive(tmp_path: Path) -> None:
    pieces = [passing("good"), script("bad", "raise SystemExit('a | b')")]
    records = runner.run(pieces, tmp_path, versions={"torch": "2"})
    (tmp_path / runner.PACKAGES).mkdir()
    runner.write_summary([*records, Record("later")], tmp_path)
    text = (tmp_path / "summary.md").read_text()
    assert "- torch: 2" in text
    lines = [re.sub(r" +", " ", line) for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == "| piece | status | seconds | last line |"
    assert lines[2:] == [
        "| good | passed | 0 | fine |",
        "| bad | failed | 0 | a / b |",
        "| later | not run | 0 | |",
    ]
    plain = json.loads((tmp_path / "summary.json").read_text())
    assert [entry["status"] for entry in plain] == [PASSED, FAILED, NOT_RUN]
    with tarfile.open(tmp_path / runner.ARCHIVE) as archive:
        names = archive.getnames()
    assert {"summary.md", "good/log.txt", "bad/record.json"} <= set(names)
    assert runner.PACKAGES not in names


# -- packages --------------------------------------------------------------------------------------


def a_wheel(folder: Path, name: str, tag: str = "py3-none-any") -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")


def test_wheels_stand_in_for_what_python_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nowhere_else", "pytest"):
        a_wheel(tmp_path, name)
    monkeypatch.setattr(packages, "NEEDED", ("pytest", "nowhere_else"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "packages"
    assert packages.missing(folder) == ["nowhere_else"]
    assert packages.unpack(tmp_path, folder) == ["nowhere_else"]
    assert packages.missing(folder) == []
    assert [path.name for path in folder.iterdir()] == ["nowhere_else"]


def test_wheels_that_cannot_be_unpacked(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no wheels in"):
        packages.unpack(tmp_path, tmp_path / "packages")
    a_wheel(tmp_path, "nowhere_else", "cp312-cp312-linux_x86_64")
    with pytest.raises(packages.CannotUnpack, match="is not pure Python"):
        packages.unpack(tmp_path, tmp_path / "packages")


# -- the list --------------------------------------------------------------------------------------


def test_every_piece_fits_into_a_call() -> None:
    assert len({piece.name for piece in PIECES}) == len(PIECES)
    assert max(piece.limit for piece in PIECES) == LONGEST
    assert len(BY_DEVICE["cuda"]) == MODELS
    assert LONGEST + runner.GRACE < 540


def test_every_benchmark_for_cuda_has_a_piece() -> None:
    pieces = {p.name.removeprefix("benchmark-") for p in PIECES if "benchmarks" in p.command}
    assert pieces == {n for n, module in registry().items() if "cuda" in devices(module)}


def test_every_file_with_tests_for_a_gpu_is_in_one_piece() -> None:
    mark = re.compile(r"^(@pytest\.mark\.gpu|pytestmark = pytest\.mark\.gpu)", re.M)
    marked = [p for p in (ROOT / "tests").rglob("*.py") if mark.search(p.read_text())]
    listed = [part for piece in PIECES for part in piece.command if part.startswith("tests/")]
    assert sorted(listed) == sorted(str(path.relative_to(ROOT)) for path in marked)


# -- the command -----------------------------------------------------------------------------------


def test_the_list_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [piece.name for piece in PIECES]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "--out DIR is needed"),
        (["--out", "x", "infos"], "no piece 'infos'; known: info, check"),
    ],
)
def test_what_cannot_start(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", *arguments]


@pytest.mark.slow("a benchmark's own test, which runs it small")
@needs_a_cpu_build
def test_the_whole_on_a_gpu_by_name(tmp_path: Path) -> None:
    done = subprocess.run(
        command("--fake", "h100", "--out", str(tmp_path)),
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    log = {p.parent.name: p.read_text() for p in tmp_path.glob("*/log.txt")}
    assert done.returncode == 0, log
    assert log.keys() == {"info"}
    assert "NVIDIA H100" in log["info"]
    assert "| info  | passed |" in done.stdout


@pytest.mark.slow("a benchmark's own test, which runs it small")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there it would pass")
def test_a_piece_that_fails_makes_the_whole_fail(tmp_path: Path) -> None:
    done = subprocess.run(
        command("--out", str(tmp_path), "info"),
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "device 'cuda' is not there" in (tmp_path / "info" / "log.txt").read_text()
    assert "| info  | failed |" in done.stdout


def test_a_request_to_end_takes_the_piece_along(tmp_path: Path) -> None:
    code = f"""
import signal, sys
from pathlib import Path
from benchmarks.gpu import __main__, runner
signal.signal(signal.SIGTERM, __main__._terminated)
piece = runner.Piece("hangs", ("-c", {f"{SLEEPER}; p.wait()"!r}), 60.0)
runner.run([piece], Path({str(tmp_path)!r}))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    log = tmp_path / "hangs" / "log.txt"
    assert wait_for(lambda: log.exists() and log.read_text().endswith("\n"), 20.0)
    sleeper = int(log.read_text())
    process.terminate()
    assert process.wait(20.0) == 128 + signal.SIGTERM
    assert wait_for(lambda: gone(sleeper))
