"""One model, to be taken up by the benchmark: `python -m benchmarks.real_models DEVICE NUMBER`."""

from __future__ import annotations

import dataclasses
import sys

import torch

from benchmarks.peers.measure import measure_some

from . import full

if __name__ == "__main__":
    kind, number = sys.argv[1:]
    device = torch.device(kind)
    work = full(device)
    measure_some(dataclasses.replace(work, tasks=(work.tasks[int(number)],)), device)
