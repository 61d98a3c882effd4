"""`python -m benchmarks.papers DEVICE ROW...`: train these rows (by number) and keep them.

`python -m benchmarks run papers` then trains only the others. For machines that are lent for
minutes. With no row, the report is written of the newest there are; it says which of them an
earlier state of the code trained.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.harness.report import RESULTS

from . import report_of
from .rows import FULL, keep, latest
from .tasks import ROWS

if __name__ == "__main__":
    kind, *numbers = sys.argv[1:]
    device = torch.device(kind)
    for number in numbers:
        keep(ROWS[int(number)], device)
    if not numbers:
        rows = {task.name: row for task in ROWS if (row := latest(task, device)) is not None}
        print(report_of(rows, FULL, device).write(RESULTS))
