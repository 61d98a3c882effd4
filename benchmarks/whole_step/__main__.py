"""The fresh process in which `starts` times the first steps of an arm.

python -m benchmarks.whole_step "MLP 64, FP16" "whole O1" cpu       # prints JSON

It is started with caches of its own.
"""

from __future__ import annotations

import json
import sys

import torch

from .starts import first_steps

if __name__ == "__main__":
    _, row, arm, device = sys.argv
    print(json.dumps(first_steps(row, arm, torch.device(device))))
