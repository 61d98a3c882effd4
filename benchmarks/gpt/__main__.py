"""The fresh process in which `starts` times a first step.

python -m benchmarks.gpt "mpcompile O1" cpu       # prints JSON

It is started with caches of its own.
"""

from __future__ import annotations

import json
import sys

import torch

from .starts import first_step

if __name__ == "__main__":
    _, name, device = sys.argv
    print(json.dumps(first_step(name, torch.device(device))))
