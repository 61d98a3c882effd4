"""Plants each defect of `mutants.py` in a copy of the tree, and says whether the tests see it.

    python tests/support/plant.py              all, one process for each core
    python tests/support/plant.py lr-ignored   these alone

It ends with status 1 if a defect is not caught. Tests of other groups than the default don't count.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from mutants import MUTANTS, Mutant
from repository import ROOT

TREE = ("benchmarks", "examples", "mpcompile", "passes", "tests", "pyproject.toml")
FAILED_TESTS = 1  # pytest's status; anything else but 0 says that no test could run


def copied(to: Path) -> Path:
    """A copy of what the tests need."""
    junk = shutil.ignore_patterns("__pycache__", "results", ".hypothesis")
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=junk)
        else:
            shutil.copy(ROOT / name, to / name)
    return to


def planted(mutant: Mutant, tree: Path) -> str:
    """Run its tests on a tree that has the defect, and take the defect out again.

    Returns:
        The test that failed, or "" where none did.

    Raises:
        RuntimeError: the tests could not be run.
    """
    file = tree / mutant.file
    text = file.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.name}: its text is not once in {mutant.file}"
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        done = subprocess.run(
            [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
             "--tb=no", *mutant.caught_by],
            cwd=tree, env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        file.write_text(text)
    if done.returncode not in (0, FAILED_TESTS):
        raise RuntimeError(f"{mutant.name}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    return failed[0].split()[1].split("/")[-1] if done.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", choices=[[], *(m.name for m in MUTANTS)])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.names or m.name in given.names]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(given.jobs):
            (Path(folder) / str(number)).mkdir()
            trees.put(copied(Path(folder) / str(number)))

        def judged(mutant: Mutant) -> tuple[str, float]:
            tree, start = trees.get(), time.monotonic()
            try:
                return planted(mutant, tree), time.monotonic() - start
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(given.jobs) as pool:
            for mutant, (by, seconds) in zip(chosen, pool.map(judged, chosen), strict=True):
                missed += not by
                verdict = f"caught by {by}" if by else "NOT CAUGHT"
                print(f"{mutant.name:30} {seconds:4.0f} s  {verdict}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} are caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
