"""Trains an MLP in pieces and by a whole step on a GPU that exists by name; tells as JSON.

    python tests/support/fake_cuda_whole_step.py h100

A process of its own: fakecuda must be loaded before torch, and a process stays the GPU it became.
Nothing can be recorded as a CUDA graph here; what torch would record, and which inputs it would
take to stay where they are, it says all the same.
"""

from benchmarks import fakecuda  # isort: skip  (before torch)

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.compile_fx as compile_fx
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from benchmarks.cuda_parts.inductor import set_for_all_threads
from benchmarks.fakecuda.counting import Counter, count
from mpcompile import LossScale, MPOptimizer, mpcompile

recorded: list[dict[str, Any]] = []


def record(run: Any, static_input_idxs: Sequence[int], **told: Any) -> Any:
    recorded.append({"stay": list(static_input_idxs), "written": list(told["mutated_input_idxs"])})
    return run


def make(level: str, *, whole: bool) -> tuple[Callable[..., torch.Tensor], int]:
    """A step, and how many parameters it trains."""
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(),
                          nn.Linear(512, 16))  # fmt: skip
    optimizer = MPOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), max_grad_norm=1.0)
    # Its start is given: here all values are 0, and gradients of zeros find none.
    scale = LossScale.dynamic(init_scale=2.0**16)
    options: Any = {"level": level, "mode": "reduce-overhead", "loss_scale": scale}

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    forward = loss_of if whole else mpcompile(loss_of, **options)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = forward(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return (mpcompile(step, **options) if whole else step), len(list(model.parameters()))


def train(device: fakecuda.FakeGPU, counter: Counter, level: str, *, whole: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    recorded.clear()
    with device:
        with torch.device("cuda"):
            step, parameters = make(level, whole=whole)
            x, y = torch.randn(256, 512), torch.randint(0, 16, (256,))
        for _ in range(3):
            step(x, y)
        device.reads.clear()
        with counter.watch() as done:
            step(x, y)
    return {
        "level": level, "whole": whole, "parameters": parameters, "kernels": len(done),
        "bytes": sum(kernel.bytes for kernel in done), "reads": len(device.reads),
        "left": getattr(step, "left", None), "recorded": list(recorded),
        "not recorded": counters["inductor"]["cudagraph_skips"],
    }  # fmt: skip


def main() -> None:
    # torch's own advice on fakes of another kind than those of its tests
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor|TensorFloat32")
    device = fakecuda.become(sys.argv[1])
    counter = count(device)
    torch._C._cuda_cudaCachingAllocator_is_enabled = lambda: True  # type: ignore[attr-defined]
    compile_fx.cudagraphify = record
    set_for_all_threads(torch._inductor.config, "graph_partition", False)
    found = [
        train(device, counter, level, whole=whole)
        for level in ("O1", "O2")
        for whole in (False, True)
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
