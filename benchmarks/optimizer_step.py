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

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: `python benchmarks/optimizer_step.py`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, fx, nn

from benchmarks.harness import (
    Arm,
    Ratio,
    Report,
    Settings,
    Table,
    environment,
    idle_wait,
    ratio,
    summarize,
    take_turns,
)
from mpcompile import LossScale, MPOptimizer, ir
from mpcompile.state import copies
from mpcompile.state.low_gradients import Multiplied

IDEAL = 30
"""Bytes per parameter: a low gradient read twice (4), parameter and moments read and written (24),
a low copy written (2)."""

OVER_SCALED = {"cpu": 1.15, "cuda": 1.3}
RATE = 1e-4
COMPILED, COPY = "torch.compile(AdamW.step), no scaling", "memory copy"
LOW, CLIPPED = ", low gradients, copies", ", clipped"


@dataclasses.dataclass(frozen=True)
class Work:
    """What is measured, and how often: a GPT's parameters, tied embeddings."""

    vocab: int = 4099
    context: int = 128
    width: int = 512
    layers: int = 8
    emit: str = "inductor"
    rounds: int = 40
    steps: int = 3
    starts: bool = True

    def shapes(self) -> Iterator[tuple[int, ...]]:
        d = self.width
        yield from ((self.vocab, d), (self.context, d))
        for _ in range(self.layers):
            yield from ((d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,))  # norm, attention
            yield from ((d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,))  # norm, MLP
        yield from ((d,), (d,))


CPU = Work()
# GPT-2's 124M: a GPU is through the CPU's 27M before the next kernel is launched.
CUDA = Work(vocab=50257, context=1024, width=768, layers=12, steps=10)
TINY = Work(vocab=61, context=16, width=32, layers=1, emit="eager", rounds=1, steps=1, starts=False)


@dataclasses.dataclass(frozen=True)
class Ours:
    """A situation of ours. Named so that a peer in the same situation ends in the same words."""

    low: bool = False
    clip: bool = False

    @property
    def name(self) -> str:
        return "mpcompile" + LOW * self.low + CLIPPED * self.clip


@dataclasses.dataclass(frozen=True)
class Peer:
    """One of the others.

    Attributes:
        settings: AdamW's.
        bytes_: of memory traffic for each parameter.
        why: the sum, reads and writes of what.
        scaled: under a GradScaler.
        clip: unscale_ and clip_grad_norm_ before the step.
        cast: cast the weights into low copies after it.
        compile: torch.compile the step.
    """

    name: str
    settings: dict[str, Any]
    bytes_: int
    why: str
    scaled: bool = True
    clip: bool = False
    cast: bool = False
    compile: bool = False


_CHECK = "8 check (unscales in place: gradient read, written)"
_FUSED = "16 read p, g, m, v + 12 written p, m, v"
_CAST = "6 cast (4 read, 2 written)"
_CLIP = "4 norm + 8 clip in place"
_FUSED_ON, _FOREACH_ON = {"fused": True}, {"foreach": True}
PEERS = (
    Peer("GradScaler + fused AdamW", _FUSED_ON, 40,
         f"{_CHECK} + {_FUSED} + 4 gradient unscaled again, written"),
    Peer("GradScaler + foreach AdamW", _FOREACH_ON, 88,
         f"{_CHECK} + a pass for each of 8 operators: 8 + 12 + 8 + 12 + 8 + 8 + 8 + 16"),
    Peer("GradScaler + fused AdamW, copies", _FUSED_ON, 46,
         f"40 as without copies + {_CAST}", cast=True),
    Peer("GradScaler + fused AdamW" + CLIPPED, _FUSED_ON, 48,
         f"{_CHECK} + {_CLIP} + {_FUSED}", clip=True),
    Peer("GradScaler + fused AdamW, copies" + CLIPPED, _FUSED_ON, 54,
         f"48 as without copies + {_CAST}", clip=True, cast=True),
    Peer(COMPILED, {}, 28, _FUSED, scaled=False, compile=True),
    Peer("fused AdamW, no scaling", _FUSED_ON, 28, _FUSED, scaled=False),
)  # fmt: skip
OURS = tuple(Ours(low, clip) for clip in (False, True) for low in (False, True))


def run(settings: Settings) -> Report:
    """Measure everything; under `settings.quick` tiny shapes, once, without compiling."""
    return measure(TINY if settings.quick else _work(settings.device), settings.device)


def _work(device: torch.device) -> Work:
    return CUDA if device.type == "cuda" else CPU


def measure(work: Work, device: torch.device) -> Report:
    """All arms in turns in this process, then first steps in processes of their own."""
    record = environment(device)
    numel = sum(torch.Size(shape).numel() for shape in work.shapes())
    steps: dict[str, Callable[[], object]] = {}
    moved: dict[str, float] = {COPY: 8.0}
    reasons = {COPY: "4 read + 4 written"}
    for ours in OURS:
        optimizer = ours_optimizer(ours, work, device)
        optimizer.step()
        steps[ours.name] = optimizer.step
        moved[ours.name] = bytes_moved(optimizer) / numel
        reasons[ours.name] = "counted"
    for peer in PEERS:
        steps[peer.name] = _peer_step(peer, work, device)
        moved[peer.name], reasons[peer.name] = float(peer.bytes_), peer.why
    source = torch.randn(numel, device=device)
    target = torch.empty_like(source)
    steps[COPY] = lambda: target.copy_(source)
    for step in steps.values():
        for _ in range(2):  # the first makes AdamW's state, the second must find it there
            step()
    turns = [Arm(name, step) for name, step in steps.items()]
    seconds = take_turns(turns, rounds=work.rounds, steps=work.steps, wait=idle_wait(device))
    starts = _starts(device) if work.starts else {}
    ratios = _ratios(seconds)
    return Report(
        name=f"optimizer_step_{device.type}",
        title=f"AdamW's step over {numel / 1e6:.1f}M parameters",
        notes=[
            *(__doc__ or "").strip().split("\n\n")[1:],
            f"{sum(1 for _ in work.shapes())} tensors of a GPT ({work.layers} layers, width "
            f"{work.width}, vocabulary {work.vocab}). Median [p10, p90] of {work.rounds} "
            f"interleaved rounds of {work.steps} steps. A ratio is the median over the rounds of "
            "the ratio within a round, with its 95% bootstrap interval; above 1, mpcompile is "
            "faster. GB/s is bytes by the count over the median time; a cached or written line "
            "that is first read counts as the program sees it, once. Compile time: a fresh "
            "process with empty caches, to the end of the second step.",
        ],
        tables=[
            _step_table(seconds, moved, numel),
            _ratio_table(ratios),
            Table("Bytes per parameter", ("arm", "bytes", "sum"),
                  [(name, f"{moved[name]:.1f}", reasons[name]) for name in moved]),
            *([_start_table(starts)] if starts else []),
        ],
        verdicts=_verdicts(ratios, seconds, moved, device),
        data={
            "work": dataclasses.asdict(work),
            "parameters": numel,
            "bytes_per_parameter": moved,
            "ideal_bytes_per_parameter": IDEAL,
            "seconds_per_step": seconds,
            "ratios": {
                name: {base: dataclasses.asdict(value) for base, value in group.items()}
                for name, group in ratios.items()
            },
            "seconds_to_second_step": starts,
        },
        environment=record,
    )  # fmt: skip


# -- the arms -------------------------------------------------------------------------------------


def _parameters(work: Work, device: torch.device) -> list[nn.Parameter]:
    """The same in every arm, each with an FP32 gradient."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(shape: tuple[int, ...], size: float) -> Tensor:
        return size * torch.randn(shape, generator=generator, device=device)

    parameters = []
    for shape in work.shapes():
        parameter = nn.Parameter(randn(shape, 2e-2))
        parameter.grad = randn(shape, 1e-3)
        parameters.append(parameter)
    return parameters


def _low_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cpu" else torch.float16


def _loss_scale() -> LossScale:
    return LossScale.dynamic(init_scale=1.0, growth_interval=10**9)


def ours_optimizer(ours: Ours, work: Work, device: torch.device) -> MPOptimizer:
    """An MPOptimizer in one of the situations, its gradients in place."""
    parameters = _parameters(work, device)
    scale, dtype = _loss_scale(), _low_dtype(device)
    if ours.low:
        scale.inputs(device)  # as a forward does: what it multiplied by
        for parameter in parameters:
            assert parameter.grad is not None
            low = parameter.grad.to(dtype)
            parameter.grad = None
            parameter.grad_dtype = dtype
            parameter.grad = low
            gradient = copies.copy_of(parameter, dtype).gradient
            if dtype is torch.float16:
                gradient.scale, gradient.stored = scale, Multiplied.now(scale)
                gradient.note_arrival()
    return MPOptimizer(
        torch.optim.AdamW(parameters, lr=RATE),
        loss_scale=scale,
        max_grad_norm=1.0 if ours.clip else None,
        emit=work.emit,
    )


def _peer_step(peer: Peer, work: Work, device: torch.device) -> Callable[[], object]:
    parameters = _parameters(work, device)
    lr = torch.tensor(RATE, device=device) if peer.compile else RATE  # a float is a constant
    optimizer = torch.optim.AdamW(parameters, lr=lr, **peer.settings)
    if peer.compile:
        return torch.compile(optimizer.step, backend=work.emit)
    if not peer.scaled:
        return optimizer.step
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0, growth_interval=10**9)
    scaler.scale(torch.ones((), device=device))  # it makes its tensors when it is first used
    low = [torch.empty_like(p, dtype=_low_dtype(device)) for p in parameters] if peer.cast else []

    def step() -> None:
        if peer.clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        if peer.cast:
            with torch.no_grad():
                torch._foreach_copy_(low, parameters)

    return step


# -- bytes ----------------------------------------------------------------------------------------


def bytes_moved(optimizer: MPOptimizer) -> int:
    """Bytes that the compiled pieces of its one step read and write, each input read once."""
    (step,) = optimizer._steps.values()
    pieces = step.program.pieces
    commits = sum(2 * _size(value) for _, value in pieces.commits)
    return commits + sum(_region_bytes(region.graph) for region in pieces.regions)


def _region_bytes(gm: fx.GraphModule) -> int:
    read = [n for n in gm.graph.find_nodes(op="placeholder") if any(_reads(u, n) for u in n.users)]
    copied = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    results = gm.graph.output_node().all_input_nodes
    return sum(map(_size, [*read, *(n.args[0] for n in copied), *results]))


def _reads(user: fx.Node, node: fx.Node) -> bool:
    """Whether the value is needed: not if the node is only what is written to."""
    return user.target is not torch.ops.aten.copy_.default or user.args[1] is node


def _size(node: fx.Node) -> int:
    value = ir.value(node)
    return value.numel() * value.element_size()


# -- first steps in fresh processes ---------------------------------------------------------------


def _starts(device: torch.device) -> dict[str, float]:
    return {name: _start(name, device) for name in (*(o.name for o in OURS), COMPILED)}


def _start(name: str, device: torch.device) -> float:
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.optimizer_step", "start", name, str(device)],
            cwd=Path(__file__).resolve().parent.parent,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        what = f"the process that starts {name!r} ended with {done.returncode}"
        raise RuntimeError(f"{what}:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def _first_steps(name: str, device: torch.device) -> float:
    """What the fresh process does: two steps, timed. The first makes state and compiles."""
    step = next(
        (ours_optimizer(ours, _work(device), device).step for ours in OURS if ours.name == name),
        None,
    )
    if step is None:
        step = next(_peer_step(peer, _work(device), device) for peer in PEERS if peer.name == name)
    wait = idle_wait(device)
    wait()
    start = time.perf_counter()
    for _ in range(2):
        step()
    wait()
    return time.perf_counter() - start


# -- tables ---------------------------------------------------------------------------------------

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


def _step_table(seconds: dict[str, list[float]], moved: dict[str, float], numel: int) -> Table:
    rows = []
    for name, samples in seconds.items():
        found = summarize(samples)
        rows.append(
            (
                name,
                f"{found.median * 1e3:.1f} [{found.p10 * 1e3:.1f}, {found.p90 * 1e3:.1f}]",
                f"{moved[name]:.1f}",
                f"{moved[name] * numel / found.median / 1e9:.1f}",
            )
        )
    columns = ("arm", "ms", f"bytes per parameter (ideal {IDEAL})", "GB/s")
    return Table("Step", columns, rows)


def _ratio_table(ratios: Ratios) -> Table:
    rows = [
        (name, base, str(value), f"{value.of_medians:.2f}x")
        for name, group in ratios.items()
        for base, value in group.items()
    ]
    return Table("How many times faster", ("", "than", "", "of medians"), rows)


def _start_table(starts: dict[str, float]) -> Table:
    rows = [(name, f"{value:.1f}") for name, value in starts.items()]
    return Table("Compile time", ("arm", "cold, s"), rows)


def _verdicts(
    ratios: Ratios,
    seconds: dict[str, list[float]],
    moved: dict[str, float],
    device: torch.device,
) -> dict[str, bool]:
    verdicts = {}
    target = OVER_SCALED[device.type]
    for ours in OURS:
        fair = [p.name for p in _rivals(ours) if p.scaled and p.cast == ours.low]
        fastest = min(fair, key=lambda name: summarize(seconds[name]).median)
        found = ratios[ours.name][fastest].paired
        claim = f"{ours.name} at least {target}x faster than {fastest}: {found:.2f}x"
        verdicts[claim] = found >= target
    for ours in OURS:
        if ours.low:
            claim = f"{ours.name} moves {moved[ours.name]:.1f} bytes per parameter, ideal {IDEAL}"
            verdicts[claim] = round(moved[ours.name], 1) <= IDEAL
    return verdicts


if __name__ == "__main__":
    if sys.argv[1:2] == ["start"]:
        print(json.dumps(_first_steps(sys.argv[2], torch.device(sys.argv[3]))))
    else:
        from benchmarks.__main__ import main

        sys.exit(main(["run", "optimizer_step", *sys.argv[1:]]))
