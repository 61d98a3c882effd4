"""Counts what small programs ask of a GPU that exists by name, and tells as JSON.

    python tests/support/fake_cuda_counting.py h100

A process of its own: fakecuda must be loaded before torch, and a process stays the GPU it became.
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
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.cuda_parts.inductor import set_for_all_threads
from benchmarks.fakecuda.counting import Counter, count
from benchmarks.fakecuda.launches import launches_of
from mpcompile import LossScale, MPOptimizer, mpcompile


def counted(counter: Counter, run: Callable[[], Any]) -> list[list[Any]]:
    """The kernels of a program's second run."""
    run()
    with counter.watch() as done:
        run()
    return [[x.name, x.kind, x.bytes, x.flops, str(x.dtype)] for x in done]


def graph(counter: Counter) -> list[list[Any]]:
    x, w = torch.randn(64, 512), torch.randn(512, 256)
    return counted(counter, torch.compile(lambda: F.relu(x @ w)))


def attention(counter: Counter, dtype: torch.dtype) -> list[list[Any]]:
    q = torch.randn(2, 4, 128, 64, dtype=dtype)
    return counted(counter, torch.compile(lambda: F.scaled_dot_product_attention(q, q, q)))


def fused_step(counter: Counter, *, scaled: bool) -> list[list[Any]]:
    w = nn.Parameter(torch.randn(1000, 1000))
    optimizer = torch.optim.AdamW([w], fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=scaled)

    def step() -> None:
        w.grad = torch.empty_like(w)
        scaler.step(optimizer)
        scaler.update()

    scaler.scale(torch.zeros(()))  # makes its tensor
    return counted(counter, step)


def generated_step(counter: Counter) -> list[list[Any]]:
    """At O2: after one backward, a step of AdamW over one weight that has a FP16 copy."""
    model = mpcompile(nn.Linear(1024, 1024, bias=False), level="O2", strict=True)
    optimizer = MPOptimizer(torch.optim.AdamW(model.parameters()))
    x = torch.randn(4096, 1024)

    def train() -> None:
        model(x).sum().backward()

    train()
    optimizer.step()
    train()
    with counter.watch() as done:
        optimizer.step()
    return [[k.name, k.kind, k.bytes, k.flops, str(k.dtype)] for k in done]


def step_of_many(counter: Counter) -> list[list[Any]]:
    """Over 40 small parameters."""
    parameters = [nn.Parameter(torch.randn(64, 8 + i)) for i in range(40)]
    optimizer = MPOptimizer(torch.optim.AdamW(parameters), max_grad_norm=1.0)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()

    return counted(counter, step)


class Blocks(nn.Module):
    """A network of many small parameters."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.products = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for product, norm in zip(self.products, self.norms, strict=True):
            x = F.gelu(norm(product(x)))
        return x.float().sum()


def trained(counter: Counter, level: str) -> list[list[Any]]:
    """A step of training at a level, or (no level) under autocast."""
    model = Blocks(512, 6)
    if level:
        scaled = {"loss_scale": "grad_scaler", "dtype": torch.float16}
        model = mpcompile(model, level=level, strict=True, **scaled)
    else:
        model.compile()
    x = torch.randn(4096, 512)
    adam = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=not level)

    def train() -> None:
        with torch.autocast("cuda", torch.float16, enabled=not level):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(adam)
        scaler.update()
        adam.zero_grad()

    train()
    return counted(counter, train)


# -- a whole step ----------------------------------------------------------------------------------


recorded: list[dict[str, Any]] = []


def record(run: Any, static_input_idxs: Sequence[int], **told: Any) -> Any:
    recorded.append({"stay": list(static_input_idxs), "written": list(told["mutated_input_idxs"])})
    return run


def made(level: str, *, whole: bool) -> tuple[Callable[..., torch.Tensor], int]:
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


def stepped(
    device: fakecuda.FakeGPU, counter: Counter, level: str, *, whole: bool
) -> dict[str, Any]:
    """An MLP in pieces or by a whole step. Nothing can be recorded as a CUDA graph here; what torch
    would record, and which inputs it would take to stay where they are, it says all the same.
    """
    torch._dynamo.reset()
    recorded.clear()
    with device:
        with torch.device("cuda"):
            step, parameters = made(level, whole=whole)
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
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor|TensorFloat32")
    device = fakecuda.become(sys.argv[1])
    counter = count(device)
    with device, torch.device("cuda"):
        found = {
            "graph": graph(counter),
            "FP16 attention": attention(counter, torch.float16),
            "FP32 attention": attention(counter, torch.float32),
            "fused step": fused_step(counter, scaled=False),
            "fused step, scaled": fused_step(counter, scaled=True),
            "generated step": generated_step(counter),
            "step of many": step_of_many(counter),
            "trained": {level: trained(counter, level) for level in ("", "O1", "O2")},
        }
    block = 65536
    found["launches"] = [
        launches_of(sizes, 252)
        for sizes in ([], [1] * 252, [1] * 253, [block * 2240], [block * 2240 + 1], [0, 1])
    ]
    if sys.argv[1] == "h100":  # it is much the same on each
        torch._C._cuda_cudaCachingAllocator_is_enabled = lambda: True  # type: ignore[attr-defined]
        compile_fx.cudagraphify = record
        set_for_all_threads(torch._inductor.config, "graph_partition", False)
        found["steps"] = [
            stepped(device, counter, level, whole=whole)
            for level in ("O1", "O2")
            for whole in (False, True)
        ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
