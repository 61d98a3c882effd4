"""The optimizer step alone: MPOptimizer against GradScaler with fused and foreach AdamW.

AdamW over the parameters of a GPT, no model and no backward. What differs is what arrives and what
has to be left behind:

* *FP32 gradients*: check them, skip or update.
* *Low gradients, copies*: what O2 does. Gradients are stored in the low dtype (BF16 on CPU, FP16
  times the loss scale on CUDA), and the step leaves low-precision copies of the FP32 weights for
  the next forward. A peer has FP32 gradients; it casts its weights after its step.

Each also with clipping to a global norm of 1: `GradScaler.unscale_` and `clip_grad_norm_` for the
peers. All loss scales are 1 and stay so: peers unscale in place, and gradients that shrink in every
step would soon be denormals, which a CPU is slow at. (A multiplication by 1 is not left out.)

Bytes per parameter: ours are counted from the pieces that were compiled, each input of a piece read
once and each target written once; those of the peers are arithmetic, the reasons are in `PEERS`.
"""

from __future__ import annotations

import torch

from benchmarks.harness.report import Report, Settings, Table, paragraphs, plain
from benchmarks.harness.timing import Ratio, how_compared, ratio, summarize
from benchmarks.optimizer_step.measure import (
    OURS,
    PEERS,
    TINY,
    Measured,
    Ours,
    Peer,
    measure_all,
    work_for,
)


def run(settings: Settings) -> Report:
    """Measure everything; under `settings.quick` tiny shapes, once, without compiling."""
    device = settings.device
    work = TINY if settings.quick else work_for(device)
    found = measure_all(work, device)
    ratios = _ratios(found.seconds)
    return Report(
        title=f"AdamW's step over {work.parameters / 1e6:.1f}M parameters",
        notes=[
            *paragraphs(__doc__),
            f"{sum(1 for _ in work.shapes())} tensors of a GPT ({work.layers} layers, width "
            f"{work.width}, vocabulary {work.vocab}). {work.steps} steps in a round. "
            f"{how_compared(work.rounds)} "
            "GB/s is bytes by the count over the median time; a cached or written line "
            "that is first read counts as the program sees it, once. Compile time: a fresh "
            "process with empty caches, to the end of the second step.",
        ],
        tables=[
            _step_table(found, work.parameters),
            _ratio_table(ratios),
            _bytes_table(found),
            *([_start_table(found.starts)] if found.starts else []),
        ],
        verdicts=_verdicts(ratios, found, device),
        data={
            "work": plain(work),
            "parameters": work.parameters,
            "bytes_per_parameter": found.moved,
            "ideal_bytes_per_parameter": IDEAL,
            "seconds_per_step": found.seconds,
            "ratios": plain(ratios),
            "seconds_to_second_step": found.starts,
        },
    )


IDEAL = 30
"""Bytes per parameter: a low gradient read twice (4), parameter and moments read and written (24),
a low copy written (2)."""

OVER_SCALED = {"cpu": 1.15, "cuda": 1.3}

Ratios = dict[str, dict[str, Ratio]]


def _rivals(ours: Ours) -> list[Peer]:
    """The peers that leave behind what ours does, the scaled first; then those that do less."""
    fair = [p for p in PEERS if p.scaled and p.clip == ours.clip and p.cast == ours.low]
    less = [p for p in PEERS if p.scaled and p.clip == ours.clip and ours.low and not p.cast]
    return [*fair, *less, *(p for p in PEERS if not p.scaled)]


def _ratios(seconds: dict[str, list[float]]) -> Ratios:
    return {
        ours.name: {p.name: ratio(seconds[p.name], seconds[ours.name]) for p in _rivals(ours)}
        for ours in OURS
    }


def _step_table(found: Measured, parameters: int) -> Table:
    rows = []
    for name, samples in found.seconds.items():
        one, moved = summarize(samples), found.moved[name]
        rate = moved * parameters / one.median / 1e9
        rows.append((name, one.text(), f"{moved:.1f}", f"{rate:.1f}"))
    columns = ("arm", "ms", f"bytes per parameter (ideal {IDEAL})", "GB/s")
    return Table("Step", columns, rows)


def _ratio_table(ratios: Ratios) -> Table:
    rows = [
        (name, base, str(value), f"{value.of_medians:.2f}x")
        for name, group in ratios.items()
        for base, value in group.items()
    ]
    return Table("How many times faster", ("", "than", "", "of medians"), rows)


def _bytes_table(found: Measured) -> Table:
    rows = [(name, f"{moved:.1f}", found.reasons[name]) for name, moved in found.moved.items()]
    return Table("Bytes per parameter", ("arm", "bytes", "sum"), rows)


def _start_table(starts: dict[str, float]) -> Table:
    rows = [(name, f"{value:.1f}") for name, value in starts.items()]
    return Table("Compile time", ("arm", "cold, s"), rows)


def _verdicts(ratios: Ratios, found: Measured, device: torch.device) -> dict[str, bool]:
    verdicts = {}
    target = OVER_SCALED[device.type]
    for ours in OURS:
        fair = [p.name for p in _rivals(ours) if p.scaled and p.cast == ours.low]
        fastest = min(fair, key=lambda name: summarize(found.seconds[name]).median)
        times = ratios[ours.name][fastest].paired
        claim = f"{ours.name} at least {target}x faster than {fastest}: {times:.2f}x"
        verdicts[claim] = times >= target
    for ours in OURS:
        if ours.low:
            moved = found.moved[ours.name]
            claim = f"{ours.name} moves {moved:.1f} bytes per parameter, ideal {IDEAL}"
            verdicts[claim] = round(moved, 1) <= IDEAL
    return verdicts
