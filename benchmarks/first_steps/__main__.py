"""The fresh process in which `deep` times the first step of an arm.

python -m benchmarks.first_steps "mpcompile(model)" cpu 24 128 inductor       # prints JSON

It is started with caches of its own.
"""

from __future__ import annotations

import json
import sys

import torch

from .deep import first_step

if __name__ == "__main__":
    _, arm, device, layers, width, emit = sys.argv
    print(json.dumps(first_step(arm, torch.device(device), int(layers), int(width), emit)))
