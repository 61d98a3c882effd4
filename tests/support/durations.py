"""Where the time of the tests goes: pages from pytest's own report.

    make test-all PYTEST_ARGS=--junitxml=build/tests.xml
    python tests/support/durations.py build/tests.xml --page tests/durations.md \
        --files tests/durations.json

The page lists the tests that take longest, by room. The file has the seconds of the slow tests of
each file, of which `share.py` makes a CI's share. With `--sweeps` instead, the page has what each
sweep found when it was run last: rows of files that the report lacks stay.
"""

import argparse
import json
import platform
import xml.etree.ElementTree as ET
from collections import defaultdict
from dataclasses import dataclass
from datetime import date
from pathlib import Path

TOP = 200


@dataclass(frozen=True)
class Ran:
    """A test that ran: its file from the root, its name, its seconds, how it ended, its lane."""

    file: str
    name: str
    seconds: float
    ended: str
    lane: str

    @property
    def room(self) -> str:
        return Path(self.file).parent.name


def ran(report: Path) -> list[Ran]:
    """Each test of a report in JUnit's format, as `pytest --junitxml` writes it."""
    found = []
    for case in ET.parse(report).iter("testcase"):
        ends = [p.tag for p in case if p.tag in ("failure", "error", "skipped")]
        file = case.get("classname", "").replace(".", "/") + ".py"
        lanes = [p.get("value", "") for p in case.iter("property") if p.get("name") == "lane"]
        seconds, ended = float(case.get("time", 0.0)), ends[0] if ends else "passed"
        found.append(Ran(file, case.get("name", ""), seconds, ended, lanes[0] if lanes else "test"))
    return found


def page(tests: list[Ran]) -> str:
    """Seconds by room, and of each room its tests among the longest of all."""
    import torch

    total = sum(test.seconds for test in tests)
    longest = sorted(tests, key=lambda test: -test.seconds)[:TOP]
    share = sum(test.seconds for test in longest) / total if total else 0.0
    lines = [
        "# Where the time of the tests goes",
        "",
        f"{len(tests)} tests took {total:,.0f} s of their workers' time; {len(longest)} took "
        f"{share:.0%} of it. {_cpu()}, torch {torch.__version__}.",
        "",
        "| room | tests | seconds | of these slow | passed | skipped | failed |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    rooms = defaultdict(list)
    for test in tests:
        rooms[test.room].append(test)
    in_order = sorted(rooms, key=lambda room: -sum(test.seconds for test in rooms[room]))
    for room in in_order:
        ends = [test.ended for test in rooms[room]]
        numbers = [ends.count("passed"), ends.count("skipped")]
        slow = sum(test.seconds for test in rooms[room] if test.lane == "slow")
        seconds = f"{sum(t.seconds for t in rooms[room]):,.0f}", f"{slow:,.0f}"
        cells = [room, len(ends), *seconds, *numbers, len(ends) - sum(numbers)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for room in in_order:
        mine = [test for test in longest if test.room == room]
        if mine:
            lines += ["", f"## {room}", "", "| seconds | lane | test |", "|---:|---|---|"]
            for test in mine:
                where = f"{Path(test.file).name}::{test.name}"
                lines.append(f"| {test.seconds:.1f} | {test.lane} | `{where}` |")
    return "\n".join(lines) + "\n"


SWEEPS = """\
# What the sweeps found

A row for each file, when it was run last (`make sweep`, or with `PYTEST_ARGS=` a part of it).

| sweep | rows | passed | skipped | failed | minutes | day | torch | machine |
|---|---:|---:|---:|---:|---:|---|---|---|
"""


def swept(tests: list[Ran], before: str) -> str:
    """The page of sweeps, with new rows for the files that were run, and those of `before`."""
    import torch

    rows = {line.split("`")[1]: line for line in before.splitlines() if line.startswith("| `")}
    for file in {test.file for test in tests}:
        mine = [test for test in tests if test.file == file]
        ends = [test.ended for test in mine]
        passed, skipped = ends.count("passed"), ends.count("skipped")
        cells = (
            f"`{file}`", len(mine), passed, skipped, len(mine) - passed - skipped,
            f"{sum(test.seconds for test in mine) / 60:.1f}", date.today().isoformat(),
            torch.__version__, _cpu(),
        )  # fmt: skip
        rows[file] = f"| {' | '.join(map(str, cells))} |"
    return SWEEPS + "".join(f"{rows[file]}\n" for file in sorted(rows))


def _cpu() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        file.seek(0)
        flags = file.read()
    units = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in flags]
    name = names[0] if names else platform.machine()
    return f"{len(names)} cores of {name} ({units[0] if units else 'no vectors'})"


def by_file(tests: list[Ran]) -> dict[str, float]:
    """The seconds of the slow tests of each file."""
    found: dict[str, float] = defaultdict(float)
    for test in tests:
        if test.lane == "slow":
            found[test.file] += test.seconds
    return {file: round(found[file], 1) for file in sorted(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--files", type=Path)
    parser.add_argument("--sweeps", action="store_true")
    given = parser.parse_args()
    tests = [test for report in given.reports for test in ran(report)]
    if given.sweeps:
        before = given.page.read_text() if given.page.exists() else ""
        given.page.write_text(swept(tests, before))
        return
    given.page.write_text(page(tests))
    if given.files:
        given.files.write_text(json.dumps(by_file(tests), indent=1) + "\n")


if __name__ == "__main__":
    main()
