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

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.emucuda.device import this_gpu
from benchmarks.harness.report import RESULTS, Report, Table, environment, paragraphs
from benchmarks.harness.ways import Way, trainer_for
from mpcompile.demo.gpt import GPT, GPTConfig

SIZES = GPTConfig(vocab=61, context=16, width=64, layers=2, heads=2)
WARM, STEPS = 20, 20
SCALE = 2.0**10
KINDS = ("operators", "kernels", "allocations", "copies", "pinned", "events", "waits")


def _ours(level: str, what: str = "") -> Way:
    """With an `MPOptimizer`, or as a whole step, where `what` says so."""
    return Way(f"mpcompile {level}{what}", torch.float16, level, fused=True, whole="whole" in what,
               generated=bool(what), options={"loss_scale": SCALE})  # fmt: skip


PEER = Way("compile + autocast + GradScaler", torch.float16, compiled=True, fused=True)
_OURS = ("", ", MPOptimizer", ", whole step")
ARMS = (PEER, *(_ours(level, what) for level in ("O1", "O2") for what in _OURS))


def launches(counts: dict[str, float]) -> float:
    return counts["operators"] + counts["kernels"]


def counted(arm: Way, steps: int = STEPS) -> dict[str, float]:
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


def _training(arm: Way) -> Callable[..., Any]:
    trainer = trainer_for(arm, "inductor", torch.device("cuda"))
    model = trainer.model(GPT(SIZES))
    adam = functools.partial(torch.optim.AdamW, lr=1e-3)
    optimizer = trainer.optimizer(adam, [*model.parameters()], max_grad_norm=1.0)

    def step(*batch: Tensor) -> None:
        with trainer.forward():
            loss = model(*batch)
        trainer.backward(loss)
        trainer.update(optimizer)

    return trainer.whole(step)


def main() -> None:
    found = {arm.name: counted(arm) for arm in ARMS}
    peer = found[PEER.name]
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
    )
    record = environment(torch.device("cpu")) | {"emulated": this_gpu().gpu.name}
    print(report.markdown(record))
    report.write(RESULTS, "host_calls", record)


if __name__ == "__main__":
    main()
