"""Trains small models on a GPU that exists by name, and tells as JSON what happened.

    python tests/support/fake_cuda_training.py h100

A process of its own: fakecuda must be loaded before torch, and a process stays the GPU it became.
"""

from benchmarks import fakecuda  # isort: skip  (before torch)

import json
import sys
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from gpu_models import MODELS, lines_of

from mpcompile import MPOptimizer, compiled_plans, loss_scale_of, mpcompile
from mpcompile.rules.table import TABLE

STEPS = 3


def train(device: fakecuda.FakeGPU, build: Any, level: str, generated: bool) -> dict[str, Any]:
    with device:
        with torch.device("cuda"):
            model, batch = build()
        model = mpcompile(model, level=level, emit="aot_eager", strict=True)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if generated:
            optimizer = MPOptimizer(optimizer, emit="aot_eager", max_grad_norm=1.0)
        reads = []
        for _ in range(STEPS):
            device.reads.clear()
            with torch.device("cuda"):
                inputs = batch()
            result = model(*inputs)
            loss = result[0] if isinstance(result, tuple) else result
            loss = loss if loss.ndim == 0 else F.gelu(loss).mean()
            loss.backward()
            gradients = {
                f"{'none' if p.grad is None else p.grad.dtype} on {p.device}"
                for p in model.parameters()
            }
            optimizer.step()
            optimizer.zero_grad()
            reads.append(len(device.reads))
            # Every value that is read is 0 here: no gradient would ever find the start.
            loss_scale_of(model).search.end()
    plan, *more = compiled_plans(model)
    return {
        "model": build.__name__, "level": level, "generated": generated, "reads": reads,
        "last read": device.reads[-1] if device.reads else "",
        "loss": f"{loss.dtype} on {loss.device}", "gradients": sorted(gradients),
        "graphs": 1 + len(more), "scaled": plan.scaled, "dtype": plan.dtype, "device": plan.device,
        "products": [
            f"{n.name}: {n.planned} {n.precision}"
            for n in plan.nodes
            if n.op in TABLE and TABLE[n.op].product
        ],
        "plan": lines_of(plan),
    }  # fmt: skip


def main() -> None:
    # torch's own advice on fakes of another kind than those of its tests
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    device = fakecuda.become(sys.argv[1])
    found = [
        train(device, build, level, generated)
        for build in MODELS.values()
        for level in ("O1", "O2")
        for generated in (True, False)
        # A plain optimizer does the same on every GPU: elsewhere than on the first, one level each.
        if generated or sys.argv[1] == "h100" or (build is MODELS["gpt"]) == (level == "O2")
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
