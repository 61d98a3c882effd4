"""What mixed precision saves on a GPU, and what it must not cost: memory, time, waits, graphs.

pytest -m gpu, one test at a time: others on the same GPU would be in the numbers.
"""

import functools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated import sized
from torch import nn
from torch._dynamo.utils import counters

from benchmarks.models import GPT2
from mpcompile import LossScale, MPOptimizer, loss_scale_of, mpcompile

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def given_scale() -> LossScale:
    """The backward that searches for the scale waits to see if it fits."""
    return LossScale.dynamic(init_scale=2.0**10)


def classifier() -> nn.Module:
    """Of rows of 128; the same weights at each call."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(128, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.ReLU(),
        nn.Linear(256, 10),
    ).to(DEVICE)  # fmt: skip


# -- CUDA graphs -----------------------------------------------------------------------------------


def trained(level: str, mode: str | None, steps: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses, and how far all parameters moved; after six steps nothing waits or compiles."""
    model = classifier()
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    scale = given_scale()
    mpcompile(model, dtype=torch.float16, level=level, loss_scale=scale, mode=mode, strict=True)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = MPOptimizer(sgd, mode=mode, max_grad_norm=1.0)
    xs = torch.randn(steps, 64, 128, device=DEVICE)
    ys = torch.randint(10, (steps, 64), device=DEVICE)

    def step(index: int) -> torch.Tensor:
        loss = F.cross_entropy(model(xs[index]), ys[index])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [step(i) for i in range(6)]  # compiled, warmed up, recorded
    compiled = dict(counters["stats"]), optimizer.compilations
    with no_waiting():
        losses += [step(i) for i in range(6, steps)]
    assert (dict(counters["stats"]), optimizer.compilations) == compiled
    end = torch.cat([p.detach().flatten() for p in model.parameters()])
    return torch.stack(losses), end - start


@LEVELS
def test_cuda_graphs_change_no_result(level: str) -> None:
    """Forward, backward and the step of an MPOptimizer, replayed: no wait, no recompilation."""
    torch.manual_seed(1)
    losses, moved = trained(level, None)
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(1)
    replayed, moved_too = trained(level, "reduce-overhead")
    assert counters["inductor"]["cudagraph_skips"] == 0
    torch.testing.assert_close(replayed, losses, rtol=1e-3, atol=0)
    assert (moved_too - moved).norm() < 0.01 * moved.norm()


# -- waits -----------------------------------------------------------------------------------------


@LEVELS
def test_a_step_that_overflows_is_skipped_without_a_wait(level: str) -> None:
    model = mpcompile(
        classifier(), dtype=torch.float16, level=level, loss_scale=given_scale(), strict=True
    )
    optimizer = MPOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    x, y = torch.randn(64, 128, device=DEVICE), torch.randint(10, (64,), device=DEVICE)
    too_large = 1e6 * x  # beyond FP16's 65504

    def step(inputs: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(inputs), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer.skipped.clone()

    for _ in range(4):
        step(x)
    before, scale = [p.detach().clone() for p in model.parameters()], loss_scale_of(model).value
    with no_waiting():
        skipped = step(too_large)
    assert skipped
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert loss_scale_of(model).value == scale / 2
    with no_waiting():
        skipped = step(x)
    assert not skipped
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


# -- memory ----------------------------------------------------------------------------------------

BATCH, CONTEXT, WIDTH = sized(8, 2), sized(512, 128), sized(512, 64)
_GPT2 = functools.partial(GPT2, vocab=1024, context=CONTEXT, width=WIDTH, layers=4, heads=8)


def peak(compile_: Callable[[nn.Module], Any], *, stepped: bool = False) -> int:
    """Bytes of forward and backward at their highest, above what stays resident."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = _GPT2().to(DEVICE)
    compile_(model)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    optimizer = MPOptimizer(optimizer) if stepped else optimizer
    tokens = torch.randint(1024, (BATCH, CONTEXT), device=DEVICE)
    for _ in range(3):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    resident = torch.cuda.memory_allocated(DEVICE)
    model(tokens, tokens).backward()
    return torch.cuda.max_memory_allocated(DEVICE) - resident


def test_each_way_to_save_memory_saves_some(record_property: Any) -> None:
    ways = {
        "FP32": peak(lambda model: model.compile()),
        "O1": peak(lambda model: mpcompile(model, level="O1", strict=True)),
        "O2": peak(lambda model: mpcompile(model, level="O2", strict=True), stepped=True),
        "O2, recompute": peak(
            lambda model: mpcompile(model, level="O2", recompute=True, strict=True), stepped=True
        ),
    }
    for way, size in ways.items():
        record_property(way, size)
    full, o1, o2, least = ways.values()
    assert least < o2 < o1 < full, ways
    assert o2 < 0.8 * full, ways


# -- time ------------------------------------------------------------------------------------------


def milliseconds(step: Callable[[], object], rounds: int = 20) -> float:
    """The median of one step, by the device's own clock."""
    for _ in range(5):
        step()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


@pytest.mark.real_gpu("it measures time")
def test_padding_a_large_odd_head_costs_no_time(record_property: Any) -> None:
    """50257 words, which Tensor Cores don't like: "auto" pads them, and is no slower for it."""
    x, y = torch.randn(8192, 768, device=DEVICE), torch.randint(50257, (8192,), device=DEVICE)
    spent = {}
    for pad in ("never", "auto"):
        torch.manual_seed(0)
        head = nn.Linear(768, 50257).to(DEVICE)
        mpcompile(head, dtype=torch.float16, pad=pad, strict=True)

        def step(head: nn.Module = head) -> None:
            head.zero_grad()
            F.cross_entropy(head(x), y).backward()

        spent[pad] = milliseconds(step)
        record_property(pad, spent[pad])
    assert spent["auto"] < 1.05 * spent["never"], spent
