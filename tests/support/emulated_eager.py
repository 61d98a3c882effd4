"""Uses a GPU that is emulated, operator by operator, and tells as JSON what happened.

    python tests/support/emulated_eager.py h100

A process of its own: emucuda must be loaded before torch, and a process stays the GPU it became.
"""

from benchmarks import emucuda  # isort: skip  (before torch)

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.emucuda.device import LAG

CUDA = torch.device("cuda")
LOW = [torch.float16, torch.bfloat16]


def error_of(call: Callable[[], object]) -> str:
    """The message of the error that a call raises, or ""."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


@contextmanager
def waits_raise() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def fresh_memory() -> list[bool]:
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    return [bool(torch.empty(7, dtype=d, device=CUDA).isnan().all()) for d in dtypes]


def products() -> list[bool]:
    """Whether they are FP32's, rounded once."""
    found = []
    for dtype in LOW:
        a, b = torch.randn(33, 2000).to(dtype), torch.randn(2000, 17).to(dtype)
        wanted = (a.float() @ b.float()).to(dtype)
        found += [torch.equal((a.cuda() @ b.cuda()).cpu(), wanted)]
        wide = torch.mm(a.cuda(), b.cuda(), out_dtype=torch.float32)
        found += [torch.equal(wide.cpu(), a.float() @ b.float())]
    return found


def refused() -> list[str]:
    a, b = torch.ones(4, 4, device=CUDA), torch.ones(4, 4, dtype=torch.float16, device=CUDA)
    image, kernel = b.view(1, 1, 4, 4), a.view(1, 1, 4, 4)
    return [error_of(lambda: a @ b), error_of(lambda: F.conv2d(image, kernel))]


def waits() -> dict[str, str]:
    x = torch.ones(4, device=CUDA)
    pinned, paged = torch.zeros(4).pin_memory(), torch.zeros(4)
    calls: dict[str, Callable[[], object]] = {
        "item": lambda: x[0].item(), "if": lambda: bool(x[0]), "nonzero": x.nonzero,
        "mask": lambda: x[x > 0], "cpu": x.cpu, "to the device": lambda: paged.to(CUDA),
        "in time": lambda: pinned.copy_(x, non_blocking=True),
        "pinned to the device": lambda: pinned.to(CUDA, non_blocking=True),
        "add": lambda: x + 1, "product": lambda: x @ x, "optimizer": _step,
    }  # fmt: skip
    with waits_raise():
        return {name: error_of(call) for name, call in calls.items()}


def _step() -> None:
    model = torch.empty(3, 3, device=CUDA, requires_grad=True)
    model.grad = torch.empty_like(model)
    torch.optim.AdamW([model], fused=True).step()


def late_copies() -> dict[str, Any]:
    x, pinned = torch.full((3,), 5.0, device=CUDA), torch.zeros(3).pin_memory()
    event = torch.cuda.Event()
    pinned.copy_(x, non_blocking=True)
    event.record()
    x.zero_()  # later than the copy
    found: dict[str, Any] = {"early": pinned.isnan().all().item(), "asked": event.query()}
    for _ in range(LAG):
        x.add_(1)
    found |= {"happened": event.query(), "arrived": pinned.tolist()}
    pinned.copy_(x, non_blocking=True)
    found["early again"] = pinned.isnan().all().item()
    torch.cuda.synchronize()
    return found | {"waited for": pinned.tolist(), "kernels": LAG}


def main(name: str) -> None:
    emucuda.become(name)
    torch.manual_seed(0)
    parts: list[Callable[[], Any]] = [fresh_memory, products, refused, waits, late_copies]
    print(json.dumps({part.__name__: part() for part in parts}))


if __name__ == "__main__":
    main(sys.argv[1])
