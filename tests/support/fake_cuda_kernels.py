"""Generates and compiles the kernels of small models for a GPU that exists by name; tells as JSON.

    python tests/support/fake_cuda_kernels.py h100

A process of its own: Triton has one driver, for good, and here it is the GPU's by name.
"""

from benchmarks import fakecuda  # isort: skip  (before torch)

import dataclasses
import json
import sys
import warnings
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from gpu_models import MODELS

from benchmarks.fakecuda.kernels import Lane, compile_kernels
from mpcompile import MPOptimizer, mpcompile

STEPS = 2  # all is compiled in the first


def train(device: fakecuda.FakeGPU, lane: Lane, build: Any, level: str) -> dict[str, Any]:
    torch._dynamo.reset()
    lane.kernels.clear()
    with device, torch.device("cuda"):
        model, batch = build()
        model = mpcompile(model, level=level, strict=True)
        optimizer = MPOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), max_grad_norm=1.0)
        for _ in range(STEPS):
            lane.launches.clear()
            result = model(*batch())
            loss = result[0] if isinstance(result, tuple) else result
            loss = loss if loss.ndim == 0 else F.gelu(loss).mean()
            loss.backward()
            in_graphs = len(lane.launches)
            optimizer.step()
            optimizer.zero_grad()
    return {
        "model": build.__name__,
        "level": level,
        "parameters": len(list(model.parameters())),
        "kernels": [dataclasses.asdict(kernel) for kernel in lane.kernels],
        "launched": Counter(lane.launches[:in_graphs]),
        "launched by the step": Counter(lane.launches[in_graphs:]),
    }


def main() -> None:
    # torch's own advice on fakes of another kind than those of its tests
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    device = fakecuda.become(sys.argv[1])
    lane = compile_kernels(device)
    models = [
        train(device, lane, build, level) for build in MODELS.values() for level in ("O1", "O2")
    ]
    print(json.dumps(models))


if __name__ == "__main__":
    main()
