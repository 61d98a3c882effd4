"""Uses a GPU that is emulated, operator by operator, and tells as JSON what happened.

    python tests/support/emulated_eager.py h100

A process of its own: emucuda must be loaded before torch, and a process stays the GPU it became.
"""

from benchmarks import emucuda  # isort: skip  (before torch)

import copy
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

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


def addresses() -> dict[str, bool]:
    held = torch.ones(1000, device=CUDA)
    freed = torch.ones(1000, device=CUDA)
    where = freed.data_ptr()
    del freed
    again = torch.ones(1000, device=CUDA)
    return {"again": again.data_ptr() == where, "apart": held.data_ptr() != again.data_ptr()}


def memory() -> list[int]:
    """Bytes more than before: of 100 floats, of 1000 beside them for a while, and at the end."""
    start = torch.cuda.memory_allocated()
    kept = torch.empty(100, device=CUDA)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.empty(1000, device=CUDA)
    found = [before - start, torch.cuda.max_memory_allocated() - start]
    del kept
    return [*found, torch.cuda.memory_allocated() - start]


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


def shared_memory() -> dict[str, Any]:
    x = torch.zeros(6, device=CUDA)
    x.view(2, 3)[1].add_(1)
    out = torch.empty(0, device=CUDA)
    torch.cat([x, x], out=out)
    y = torch.ones(2, device=CUDA)
    y.set_(x.untyped_storage(), 2, (2, 2), (2, 1))
    return {"view": x.tolist(), "out": out.tolist(), "set": y.tolist(), "device": str(out.device)}


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


def random_numbers() -> dict[str, bool]:
    torch.manual_seed(3)
    first, state = torch.randn(3, device=CUDA), torch.cuda.get_rng_state()
    second = torch.rand(3, device=CUDA)
    torch.cuda.set_rng_state(state)
    third = torch.rand(3, device=CUDA)
    torch.manual_seed(3)
    return {
        "seeded": torch.equal(torch.randn(3, device=CUDA), first),
        "state": torch.equal(second, third),
    }


def attention() -> dict[str, Any]:
    """Which kernel is taken, and how far values and gradients are off those in FP64."""
    mask = torch.randn(2, 3, 16, 16)
    found: dict[str, Any] = {}
    for dtype in (torch.float16, torch.float32):
        for how in ({"is_causal": True}, {"attn_mask": mask}, {"dropout_p": 0.5}):
            (word,) = how
            x = torch.randn(2, 3, 16, 8, device=CUDA, dtype=dtype, requires_grad=True)
            here = {k: v.to(x) if isinstance(v, torch.Tensor) else v for k, v in how.items()}
            result = F.scaled_dot_product_attention(x, x, x, **here)
            exact = x.detach().cpu().double().requires_grad_()
            known = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in how.items()}
            wanted = F.scaled_dot_product_attention(exact, exact, exact, **known)
            result.sum().backward()
            wanted.sum().backward()
            key = f"{dtype} {word}"
            found[key] = [type(result.grad_fn).__name__]
            if word != "dropout_p":
                found[key] += [off(result, wanted), off(x.grad, exact.grad)]
    return found


def off(found: Any, wanted: Any) -> float:
    return ((found.detach().cpu().double() - wanted).norm() / wanted.norm()).item()


def layers() -> dict[str, list[float]]:
    """How far results and gradients are off those in FP64."""
    made: dict[str, tuple[nn.Module, torch.Tensor]] = {
        "lstm": (nn.LSTM(5, 6, 2, bidirectional=True, batch_first=True), torch.randn(2, 7, 5)),
        "gru": (nn.GRU(5, 6), torch.randn(7, 2, 5)),
        "conv": (nn.Conv2d(3, 8, 3), torch.randn(2, 3, 9, 9)),
        "batch norm": (nn.BatchNorm2d(4), torch.randn(3, 4, 5, 5)),
    }
    found = {}
    for name, (layer, x) in made.items():
        exact, here = copy.deepcopy(layer).double(), layer.to(CUDA)
        errors = []
        results = [here(x.cuda()), exact(x.double())]
        mine, theirs = (r[0] if isinstance(r, tuple) else r for r in results)
        errors.append(off(mine, theirs.detach()))
        for result in (mine, theirs):
            result.square().mul(
                torch.arange(result.numel()).view_as(result).to(result)
            ).sum().backward()
        pairs = zip(here.parameters(), exact.parameters(), strict=True)
        errors += [off(p.grad, q.grad) for p, q in pairs]
        found[name] = errors
    return found


def saved(device: torch.device = CUDA) -> list[str]:
    """A checkpoint comes back to the device."""
    import io

    file = io.BytesIO()
    torch.save({"x": torch.arange(3.0, device=device)}, file)
    file.seek(0)
    x = torch.load(file)["x"]
    return [str(x.device), str(x.tolist())]


def main(name: str) -> None:
    device = emucuda.become(name)
    torch.manual_seed(0)
    parts = [
        fresh_memory, addresses, memory, products, refused, shared_memory, waits, late_copies,
        random_numbers, attention, layers, saved,
    ]  # fmt: skip
    found: dict[str, Any] = {part.__name__: part() for part in parts}
    found["name"] = [torch.cuda.get_device_name(), device.gpu.name]
    found["capability"] = [list(torch.cuda.get_device_capability()), list(device.gpu.capability)]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
