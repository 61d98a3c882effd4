"""`python -m benchmarks.papers DEVICE ROW...`: train these rows (by number) and keep them.

`python -m benchmarks run papers` then trains only the others. For machines that are lent for
minutes.
"""

from __future__ import annotations

import sys

import torch

from .rows import keep
from .tasks import TASKS

if __name__ == "__main__":
    kind, *numbers = sys.argv[1:]
    for number in numbers:
        keep(TASKS[int(number)], torch.device(kind))
