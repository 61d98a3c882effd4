"""The fresh process in which `measure` times what the first two steps take:

    python -m benchmarks.optimizer_step mpcompile cpu       # prints JSON

It is started with an empty cache.
"""

from __future__ import annotations

import json
import sys

import torch

from .measure import first_steps

if __name__ == "__main__":
    _, name, device = sys.argv
    print(json.dumps(first_steps(name, torch.device(device))))
