"""`python -m benchmarks.papers DEVICE [again | ROW...]`: train rows, by number, and keep them.

`again` trains what is off in the newest rows from all seeds. `python -m benchmarks run papers` then
trains only the others. For machines that are lent for minutes. With neither, the report is written
of the newest there are; it says which of them an earlier state of the code trained.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.harness.report import RESULTS, environment
from benchmarks.papers import report_of
from benchmarks.papers.again import look_again
from benchmarks.papers.rows import FULL, Kept, Store, keep
from benchmarks.papers.tasks import ROWS


def _newest(kind: str, section: str) -> dict[str, Kept]:
    store = Store(kind, section)
    return {task.name: row for task in ROWS if (row := store.latest(task)) is not None}


if __name__ == "__main__":
    kind, *what = sys.argv[1:]
    device = torch.device(kind)
    rows = _newest(kind, "rows")
    if what == ["again"]:
        for task in ROWS:
            if task.name in rows and not task.lacking:
                look_again(task, rows[task.name], device)
    elif what:
        for task in (ROWS[int(number)] for number in what):
            if task.lacking:
                print(f"{task.name}: skipped, because {task.lacking} is not installed")
            else:
                keep(task, device)
    else:
        report = report_of(rows, _newest(kind, "again"), FULL, device)
        print(report.write(RESULTS, f"papers_{kind}", environment(device)))
