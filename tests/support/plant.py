"""Plants faults, one at a time, and says which test sees each.

    python tests/support/plant.py watch build/faults      which tests reach the place of each fault
    python tests/support/plant.py run build/faults        plants each, and runs these tests
    python tests/support/plant.py table build/faults      writes tests/planted.md

The faults are those of `mutants.py` and, of each room, five that a seed draws (`faults.py`).
`watch` runs `make test-all` once, and notes which tests come to the place of a fault. `run` runs
these tests with the fault, first those of `make test`, the cheapest first, until one fails; where
none does, and few reach it, all tests of its room; then those of the slow lane in the same way. It
notes what caught what.

Of these tests it runs as many as take `--seconds` together: what is caught is a lower bound.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from durations import ran
from faults import drawn
from mutants import MUTANTS
from repository import ROOT

PLANTING = ROOT / "tests" / "support" / "planting"
NO_TESTS = 5  # pytest's status
FEW = 3  # a cached function is reached by the first test that calls it alone
TEST_ALL = "not sweep and not gpu"
LANES = ("make test", "make test-all")
VERDICTS = "verdicts.jsonl"
_HOW = """\
A lower bound: of the tests that reach a fault only as many are run as fit a time (`plant.py run
--seconds`), those of the fault's own room and then the cheapest first. The table names the first
that failed. Some faults change nothing that a program can see, as `strict=` of a `zip`."""


def environment(given: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(PLANTING), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "MPCOMPILE_FAULTS": str(given), "PYTHONPATH": path.strip(os.pathsep),
            "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", **more}  # fmt: skip


def watch(folder: Path, seed: int, each: int, rest: Sequence[str]) -> int:
    """Run the tests, and note what they reach."""
    (folder / "reached").mkdir(parents=True, exist_ok=True)
    faults = [dataclasses.asdict(fault) for fault in (*drawn(seed, each), *MUTANTS)]
    given = folder / "watched.json"
    given.write_text(json.dumps({"faults": faults, "reached": str(folder / "reached")}))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", TEST_ALL,
         "--numprocesses", "auto", "--dist", "worksteal", f"--junitxml={folder / 'tests.xml'}",
         *rest],
        cwd=ROOT, env=environment(given), check=False,
    ).returncode  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a fault: the test that failed and its lane, or "" where none did."""

    number: int
    fault: dict[str, Any]
    test: str = ""
    lane: str = ""
    run: int = 0
    left_out: int = 0


class Runs:
    """Runs tests with one fault.

    Args:
        folder: of `watch`.
        seconds: how long the tests of one lane may take together, as they took without a fault.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self.faults = json.loads((folder / "watched.json").read_text())["faults"]
        tests = [test for test in ran(folder / "tests.xml") if test.ended == "passed"]
        self.cost = {f"{test.file}::{test.name}": test.seconds for test in tests}
        self.lane_of = {f"{test.file}::{test.name}": LANES[test.lane == "slow"] for test in tests}

    def reach(self, number: int) -> list[str]:
        if by := self.faults[number]["caught_by"]:
            tests = {test for test in self.cost if test.startswith(tuple(by))}
        else:
            file = self.folder / "reached" / str(number)
            lines = file.read_text().splitlines() if file.exists() else []
            tests = {line.rpartition(" (")[0] for line in lines}
        room = self.faults[number]["room"].partition("/")[0]

        def order(test: str) -> tuple[bool, float]:  # those of its own room come first
            return not test.startswith(f"tests/{room}/"), self.cost[test]

        return sorted(tests & self.cost.keys(), key=order)

    def of_room(self, number: int) -> list[str]:
        room = self.faults[number]["room"].partition("/")[0]
        room = "runtime" if room == "mpcompile" else room  # where the flat modules are tested
        tests = [test for test in self.cost if room and test.startswith(f"tests/{room}/")]
        return sorted(tests, key=self.cost.__getitem__)

    def judge(self, number: int) -> Verdict:
        fault, ran, left = self.faults[number], 0, 0
        reached = self.reach(number)
        others = [t for t in self.of_room(number) if t not in reached] if len(reached) < FEW else []
        for lane in LANES:
            for tests in (reached, others):
                mine, out = self.within([test for test in tests if self.lane_of[test] == lane])
                ran, left = ran + len(mine), left + out
                if mine and (failed := self.failing(number, mine)):
                    return Verdict(number, fault, failed, lane, ran, left)
        return Verdict(number, fault, run=ran, left_out=left)

    def within(self, tests: Sequence[str]) -> tuple[list[str], int]:
        """As many of the cheapest as there is time for, and how many others there are."""
        total, taken = 0.0, []
        for test in tests:
            total += self.cost[test]
            if total > self.seconds and taken:
                break
            taken.append(test)
        return taken, len(tests) - len(taken)

    def failing(self, number: int, tests: Iterable[str]) -> str:
        """The first of them that fails with the fault."""
        with tempfile.TemporaryDirectory() as scratch:
            given, listed = Path(scratch) / "plant.json", Path(scratch) / "tests.txt"
            given.write_text(json.dumps({"faults": self.faults, "plant": number}))
            listed.write_text("\n".join(tests) + "\n")
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
                     "--tb=no", "-m", TEST_ALL, f"@{listed}"],
                    cwd=ROOT, env=environment(given, TORCHINDUCTOR_CACHE_DIR=f"{scratch}/inductor"),
                    capture_output=True, text=True, check=False, timeout=3 * self.seconds + 300,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return ""  # it may be the machine's other work: what hangs is not said to be caught
        if done.returncode in (0, NO_TESTS):
            return ""
        for line in done.stdout.splitlines():
            if line.startswith(("FAILED ", "ERROR ")):
                return line.split(" ", 1)[1].partition(" - ")[0].removeprefix("tests/")
        if "ImportError" in done.stderr:
            return "the import"
        raise RuntimeError(done.stdout[-1000:] + done.stderr[-1000:])


def run(folder: Path, seconds: float, jobs: int, only: Sequence[str]) -> int:
    """Plant each fault, and say what caught it; a verdict takes the place of an earlier one."""
    runs = Runs(folder, seconds)
    numbers = [n for n, f in enumerate(runs.faults) if not only or f["name"] in only]
    start = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        for verdict in pool.map(runs.judge, numbers):
            said = f"caught by {verdict.test}" if verdict.test else "NOT CAUGHT"
            at = f"{time.monotonic() - start:5.0f} s"
            print(at, verdict.fault["name"], said, f"({verdict.run} run)", flush=True)
            with (folder / VERDICTS).open("a") as file:
                file.write(json.dumps(dataclasses.asdict(verdict)) + "\n")
    return 0


def verdicts_of(folder: Path) -> list[Verdict]:
    """The last verdict on each fault, in the order of their numbers."""
    lines = (folder / VERDICTS).read_text().splitlines()
    found = {verdict["number"]: Verdict(**verdict) for verdict in map(json.loads, lines)}
    return [found[number] for number in sorted(found)]


def table(folder: Path, page: Path) -> int:
    """Write what caught each fault as a page; 1 if `make test` catches fewer than 80%."""
    lines = ["| fault | of | caught by | lane |", "|---|---|---|---|"]
    now = verdicts_of(folder)
    for v in now:
        what = v.fault["breaks"] or " ".join(v.fault["old"].split())[:80]
        cells = [v.fault["name"], f"`{what}`", v.test or "**nothing**", v.lane]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    fast, all_ = (sum(v.lane in LANES[: n + 1] for v in now) for n in range(2))
    said = f"Of {len(now)} faults `make test` catches {fast}, `make test-all` {all_}."
    page.write_text(f"# What the tests catch\n\n{said}\n{_HOW}\n\n" + "\n".join(lines) + "\n")
    print(said)
    return int(fast < 0.8 * len(now))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    watching = commands.add_parser("watch")
    watching.add_argument("folder", type=Path)
    watching.add_argument("--seed", type=int, default=46)
    watching.add_argument("--each", type=int, default=5)
    watching.add_argument("rest", nargs="*", help="arguments of pytest")
    watching.set_defaults(do=watch)
    running = commands.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--seconds", type=float, default=240.0)
    running.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    running.add_argument("--only", nargs="*", default=[], help="names of faults")
    running.set_defaults(do=run)
    writing = commands.add_parser("table")
    writing.add_argument("folder", type=Path)
    writing.add_argument("--page", type=Path, default=ROOT / "tests" / "planted.md")
    writing.set_defaults(do=table)
    given = vars(parser.parse_args())
    given["folder"] = given["folder"].resolve()
    return partial(given.pop("do"), **given)()


if __name__ == "__main__":
    sys.exit(main())
