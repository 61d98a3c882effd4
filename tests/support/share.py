"""The files of which a CI runs the slow tests: what a change touches, and a share of the rest.

    pytest -m slow $(python tests/support/share.py --minutes 10)

A change touches the tests of its rooms, and each file that imports, itself or by its support, a
file that is changed. The share of the rest is another for each commit. stderr says what is left
out. Seconds are those of `tests/durations.json` (`durations.py`), times how much slower this
machine is than usual; a file that is not there is thought to take a minute.
"""

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from lanes import slower
from repository import ROOT, SUPPORT

SECONDS = ROOT / "tests" / "durations.json"
UNKNOWN = 60.0
_SLOW = re.compile(r"\bslow(_rows)?\(")


def git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def changed(since: str) -> set[str]:
    """Files that the commits after `since` change, by their paths from the root."""
    return set(git("diff", "--name-only", since, "HEAD").splitlines()) if since else set()


def before() -> str:
    """The commit that a change starts from: `CI_BASE`, or where it left the main branch; on that
    branch itself the last one that is a day older.
    """
    if given := os.environ.get("CI_BASE"):
        return given
    fork, head = git("merge-base", "HEAD", "origin/main"), git("rev-parse", "HEAD")
    if fork not in ("", head):
        return fork
    day_before = int(git("log", "-1", "--format=%ct") or 0) - 24 * 60 * 60
    return git("rev-list", "-1", f"--before={day_before}", "HEAD")


def imports(file: Path) -> set[str]:
    """Our own files that a file of tests imports, itself or by its support."""
    found, to_read = set(), [file]
    while to_read:
        for name in _modules(to_read.pop()):
            parts = name.split(".")
            support = SUPPORT / f"{parts[0]}.py"
            inner = Path(*parts)
            for path in (support, ROOT / inner.with_suffix(".py"), ROOT / inner / "__init__.py"):
                if path.exists() and (key := _from_root(path)) not in found:
                    found.add(key)
                    if path == support:
                        to_read.append(path)
    return found


def _modules(file: Path) -> Iterable[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _from_root(path: Path) -> str:
    return path.resolve().relative_to(ROOT).as_posix()  # mpcompile/passes is a link


def is_touched(file: str, by: set[str]) -> bool:
    """Whether a change of the files `by` is of its room, of itself, or of what it imports."""
    sources = [Path(path).parts for path in by if path.endswith(".py")]
    rooms = {parts[parts[0] == "mpcompile"] for parts in sources if parts[0] != "tests"}
    if file in by or Path(file).parent.name in rooms:
        return True
    return not imports(ROOT / file).isdisjoint(by)


def slow_files() -> dict[str, float]:
    """The files that have slow tests, and the seconds that these take."""
    known = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    files = sorted((ROOT / "tests").glob("*/test_*.py"))
    slow = [_from_root(file) for file in files if _SLOW.search(file.read_text())]
    return {file: known.get(file, UNKNOWN) for file in slow}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, required=True, help="how long it may take in all")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    seconds = slow_files()
    by = changed(before())
    touched = [file for file in seconds if is_touched(file, by)]
    rest = sorted(seconds.keys() - touched)
    draw = random.Random(git("rev-parse", "HEAD"))
    for files in (touched, rest):
        draw.shuffle(files)
    left = given.minutes * 60 * given.workers / slower()
    taken, out = [], []
    for file in (*touched, *rest):
        fits = seconds[file] <= left
        (taken if fits else out).append(file)
        left -= seconds[file] * fits
    print(f"slow tests of {len(taken)} of {len(seconds)} files; the change touches {len(touched)}",
          file=sys.stderr)  # fmt: skip
    for file in out:
        why = "touched, but over the budget" if file in touched else "not in this commit's share"
        print(f"left out: {file} ({seconds[file]:.0f} s; {why})", file=sys.stderr)
    print("\n".join(taken))


if __name__ == "__main__":
    main()
