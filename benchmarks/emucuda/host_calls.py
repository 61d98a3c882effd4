"""What the host asks of a GPU in one training step, beside compile + autocast.

    python -m benchmarks.emucuda h100 -m benchmarks.emucuda.host_calls    # in make emulated's venv

A GPT of two layers trains in FP16 on the emulated GPU, with AdamW and clipping. The steps counted
come after the warm-up, when nothing compiles and the scale stands: the mean of twenty.

The peer is `torch.compile` under autocast with a GradScaler and torch's fused AdamW. An operator
counts as one, although torch's multi-tensor ones launch several kernels for long lists. Memory of
the device comes from a cache, so an allocation costs the host microseconds, and the GPU nothing; a
wait costs all that the GPU is behind by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.emucuda.device import this_gpu
from benchmarks.harness.report import RESULTS, Report, Table, environment, paragraphs
from mpcompile import MPOptimizer, mpcompile
from mpcompile.demo.gpt import GPT, GPTConfig

SIZES = GPTConfig(vocab=61, context=16, width=64, layers=2, heads=2)
WARM, STEPS = 20, 20
SCALE = 2.0**10
KINDS = ("operators", "kernels", "allocations", "copies", "pinned", "events", "waits")


@dataclass(frozen=True)
class Arm:
    """A way of training: autocast where there is no level."""

    name: str
    level: str = ""
    generated: bool = False
    whole: bool = False


ARMS = (
    Arm("compile + autocast + GradScaler"),
    Arm("mpcompile O1", "O1"),
    Arm("mpcompile O1, MPOptimizer", "O1", generated=True),
    Arm("mpcompile O1, whole step", "O1", generated=True, whole=True),
    Arm("mpcompile O2", "O2"),
    Arm("mpcompile O2, MPOptimizer", "O2", generated=True),
    Arm("mpcompile O2, whole step", "O2", generated=True, whole=True),
)


def launches(counts: dict[str, float]) -> float:
    return counts["operators"] + counts["kernels"]


def counted(arm: Arm, steps: int = STEPS) -> dict[str, float]:
    """What one of so many steps asks for, by kind; see `EmulatedGPU.host_calls`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    step = _training(arm)
    tokens = torch.randint(SIZES.vocab, (2, SIZES.context + 1))
    batch = tokens[:, :-1].cuda(), tokens[:, 1:].cuda()
    for _ in range(WARM):
        step(*batch)
    gpu = this_gpu()
    before = gpu.host_calls()
    for _ in range(steps):
        step(*batch)
    after = gpu.host_calls()
    return {kind: (after[kind] - before[kind]) / steps for kind in KINDS}


def _training(arm: Arm) -> Callable[..., Any]:
    model: nn.Module = GPT(SIZES).cuda()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if not arm.level:
        return _autocast(model, adam)
    optimizer = MPOptimizer(adam, max_grad_norm=1.0) if arm.generated else adam

    def step(*batch: Tensor) -> None:
        model(*batch).backward()
        if not arm.generated:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    compiled = mpcompile(
        step if arm.whole else model, dtype="fp16", level=arm.level, loss_scale=SCALE
    )
    return compiled if arm.whole else step


def _autocast(model: nn.Module, adam: torch.optim.Optimizer) -> Callable[..., Any]:
    model.compile()
    scaler = torch.amp.GradScaler("cuda", init_scale=SCALE)

    def step(*batch: Tensor) -> None:
        with torch.autocast("cuda", torch.float16):
            loss = model(*batch)
        scaler.scale(loss).backward()
        scaler.unscale_(adam)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(adam)
        scaler.update()
        adam.zero_grad()

    return step


def main() -> None:
    found = {arm.name: counted(arm) for arm in ARMS}
    peer = found[ARMS[0].name]
    low = {arm.name: found[arm.name] for arm in ARMS if arm.generated and arm.level == "O2"}
    claims: dict[str, Callable[[dict[str, float]], bool]] = {
        "launches less (operators and kernels)": lambda c: launches(c) < launches(peer),
        "allocates less often": lambda c: c["allocations"] < peer["allocations"],
        "waits for nothing": lambda c: c["waits"] == 0,
    }
    rows = [(name, *(f"{counts[kind]:g}" for kind in KINDS)) for name, counts in found.items()]
    report = Report(
        title="What the host asks of a GPU in one step, counted on an emulated one",
        notes=paragraphs(__doc__)[1:],
        tables=[Table("In one step", ("", *KINDS), rows)],
        verdicts={
            f"{name} {claim}": holds(counts)
            for name, counts in low.items()
            for claim, holds in claims.items()
        },
        data={"counted": found},
        beside={"emulated": this_gpu().gpu.name},
    )
    record = environment(torch.device("cpu"))
    print(report.markdown(record))
    report.write(RESULTS, "host_calls", record)


if __name__ == "__main__":
    main()
