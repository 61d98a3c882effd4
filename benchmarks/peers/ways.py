"""The arms: what users have without mpcompile, and mpcompile."""

from __future__ import annotations

import torch

from benchmarks.papers.ways import Way

__all__ = [
    "AUTOCAST",
    "BUDGETED",
    "COMPILED",
    "EAGER",
    "OURS",
    "PEERS",
    "PIECES",
    "RECOMPUTES",
    "WHOLE",
    "ways",
]

EAGER = "eager FP32"
COMPILED = "compile FP32"
EAGER_AUTOCAST = "eager autocast"
AUTOCAST = "compile + autocast"
BUDGETED = "compile + autocast, budget 0.5"
PEERS = (EAGER, COMPILED, EAGER_AUTOCAST, AUTOCAST, BUDGETED)
PIECES = ("mpcompile O1", "mpcompile O2")
WHOLE = ("mpcompile O1, whole step", "mpcompile O2, whole step")
OURS = (*PIECES, *WHOLE)
RECOMPUTES = "mpcompile O2, recompute"


def ways(device: torch.device, emit: str) -> tuple[Way, ...]:
    """All arms on a device: on a CPU in BF16, else in FP16; ours by `dtype="auto"`.

    Every peer has a fused optimizer, those in FP16 a GradScaler. Only Inductor recomputes.
    """
    low = torch.bfloat16 if device.type == "cpu" else torch.float16
    ours = "auto"
    return (
        Way(EAGER, fused=True),
        Way(COMPILED, compiled=True, fused=True),
        Way(EAGER_AUTOCAST, low, fused=True),
        Way(AUTOCAST, low, compiled=True, fused=True),
        Way(BUDGETED, low, compiled=True, fused=True, budget=0.5),
        Way(PIECES[0], ours, "O1", fused=True),
        Way(PIECES[1], ours, "O2"),
        Way(WHOLE[0], ours, "O1", whole=True),
        Way(WHOLE[1], ours, "O2", whole=True),
        Way(RECOMPUTES, ours, "O2", recompute=emit == "inductor"),
    )
