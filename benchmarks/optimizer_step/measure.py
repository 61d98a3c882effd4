"""All arms in turns in this process, then first steps in processes of their own."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable

import torch

from benchmarks.harness.processes import json_from_process
from benchmarks.harness.timing import Arm, idle_wait, take_turns

from .arms import COMPILED, COPY, OURS, PEERS, Work, ours_optimizer, peer_step, work_for
from .traffic import bytes_moved

__all__ = ["Measured", "first_steps", "measure_all"]


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the arms showed. Each dict is by the arm's name.

    Attributes:
        seconds: of a step, a sample a round.
        moved: bytes of memory traffic for each parameter.
        reasons: how `moved` comes about.
        starts: seconds to the end of the second step in a fresh process; empty if not measured.
    """

    seconds: dict[str, list[float]]
    moved: dict[str, float]
    reasons: dict[str, str]
    starts: dict[str, float]


def measure_all(work: Work, device: torch.device) -> Measured:
    """Time every arm, and count the bytes of ours."""
    steps: dict[str, Callable[[], object]] = {}
    moved: dict[str, float] = {COPY: 8.0}
    reasons = {COPY: "4 read + 4 written"}
    for ours in OURS:
        optimizer = ours_optimizer(ours, work, device)
        optimizer.step()
        steps[ours.name] = optimizer.step
        moved[ours.name] = bytes_moved(optimizer) / work.parameters
        reasons[ours.name] = "counted"
    for peer in PEERS:
        steps[peer.name] = peer_step(peer, work, device)
        moved[peer.name], reasons[peer.name] = float(peer.bytes_), peer.why
    source = torch.randn(work.parameters, device=device)
    target = torch.empty_like(source)
    steps[COPY] = lambda: target.copy_(source)
    for step in steps.values():
        for _ in range(2):  # the first makes AdamW's state, the second must find it there
            step()
    turns = [Arm(name, step) for name, step in steps.items()]
    seconds = take_turns(turns, rounds=work.rounds, steps=work.steps, wait=idle_wait(device))
    return Measured(seconds, moved, reasons, _starts(device) if work.starts else {})


def _starts(device: torch.device) -> dict[str, float]:
    return {name: _start(name, device) for name in (*(o.name for o in OURS), COMPILED)}


def _start(name: str, device: torch.device) -> float:
    arguments = ("-m", "benchmarks.optimizer_step", name, str(device))
    with tempfile.TemporaryDirectory() as cache:
        empty = {"TORCHINDUCTOR_CACHE_DIR": cache}
        return float(json_from_process(*arguments, environment=empty))


def first_steps(name: str, device: torch.device) -> float:
    """What the fresh process does: two steps, timed. The first makes state and compiles."""
    work = work_for(device)
    ours = next((one for one in OURS if one.name == name), None)
    if ours:
        step: Callable[[], object] = ours_optimizer(ours, work, device).step
    else:
        step = peer_step(next(one for one in PEERS if one.name == name), work, device)
    wait = idle_wait(device)
    wait()
    start = time.perf_counter()
    for _ in range(2):
        step()
    wait()
    return time.perf_counter() - start
