"""Counts what small programs ask of a GPU that exists by name, and tells as JSON.

    python tests/support/fake_cuda_counting.py h100

A process of its own: fakecuda must be loaded before torch, and a process stays the GPU it became.
"""

from benchmarks import fakecuda  # isort: skip  (before torch)

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.fakecuda.counting import Counter, count
from benchmarks.fakecuda.launches import launches_of
from mpcompile import MPOptimizer, mpcompile


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
    print(json.dumps(found))


if __name__ == "__main__":
    main()
