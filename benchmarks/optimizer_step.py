"""The optimizer step alone: MPOptimizer against GradScaler with fused AdamW.

AdamW over the parameters of a GPT, no model and no backward. What differs is what arrives and what
has to be left behind:

* *FP32 gradients*: check them, skip or update.
* *Low gradients, copies*: what O2 does. Gradients are stored in the low dtype (BF16 on CPU, FP16
  times the loss scale on CUDA), and the step leaves low-precision copies of the FP32 weights for
  the next forward. A peer has FP32 gradients; it casts its weights after its step.

Each also with clipping to a global norm of 1: `GradScaler.unscale_` and `clip_grad_norm_` for the
peers. All loss scales are 1 and stay so: peers unscale in place, and gradients that shrink in every
step would soon be denormals, which a CPU is slow at. (A multiplication by 1 is not left out.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.harness import timing
from benchmarks.harness.report import Claims, Report, Settings, Table, paragraphs, plain
from mpcompile import LossScale, MPOptimizer
from mpcompile.scaling import copies


def run(settings: Settings) -> Report:
    """Measure everything; under `settings.quick` tiny shapes, once, without compiling."""
    device = settings.device
    full = CUDA if device.type == "cuda" else CPU
    work = TINY if settings.quick else full
    seconds = measure_all(work, device)
    ratios = _ratios(seconds)
    return Report(
        title=f"AdamW's step over {work.parameters / 1e6:.1f}M parameters",
        notes=[
            *paragraphs(__doc__),
            f"{sum(1 for _ in work.shapes())} tensors of a GPT ({work.layers} layers, width "
            f"{work.width}, vocabulary {work.vocab}). {work.steps} steps in a round. "
            f"{timing.how_compared(work.rounds)}",
        ],
        tables=[_step_table(seconds), _ratio_table(ratios)],
        verdicts=dict(_verdicts(ratios, device)),
        data={
            "work": plain(work),
            "parameters": work.parameters,
            "seconds_per_step": seconds,
            "ratios": plain(ratios),
        },
    )


# -- arms ------------------------------------------------------------------------------------------
# What is compared: the sizes, the situations of ours, and the peers.

RATE = 1e-4
LOW, CLIPPED = ", low gradients, copies", ", clipped"


@dataclasses.dataclass(frozen=True)
class Work:
    """What is measured, and how often: a GPT's parameters, tied embeddings."""

    vocab: int
    context: int
    width: int
    layers: int
    emit: str = "inductor"
    rounds: int = 40
    steps: int = 3

    @property
    def parameters(self) -> int:
        """How many numbers there are in all of them."""
        return sum(math.prod(shape) for shape in self.shapes())

    def shapes(self) -> Iterator[tuple[int, ...]]:
        d = self.width
        yield from ((self.vocab, d), (self.context, d))
        for _ in range(self.layers):
            yield from ((d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,))  # norm, attention
            yield from ((d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,))  # norm, MLP
        yield from ((d,), (d,))


CPU = Work(vocab=4099, context=128, width=512, layers=8)
# GPT-2's 124M: a GPU is through the CPU's 27M before the next kernel is launched.
CUDA = Work(vocab=50257, context=1024, width=768, layers=12, steps=10)
TINY = Work(vocab=61, context=16, width=32, layers=1, emit="eager", rounds=1, steps=1)


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
    """torch's fused AdamW.

    Attributes:
        clip: unscale_ and clip_grad_norm_ before the step.
        cast: cast the weights into low copies after it.
        scaled: under a GradScaler.
    """

    clip: bool = False
    cast: bool = False
    scaled: bool = True

    @property
    def name(self) -> str:
        if not self.scaled:
            return "fused AdamW, no scaling"
        return "GradScaler + fused AdamW" + ", copies" * self.cast + CLIPPED * self.clip


ALONE = Peer(scaled=False)
PEERS = (*(Peer(clip, cast) for clip in (False, True) for cast in (False, True)), ALONE)
OURS = tuple(Ours(low, clip) for clip in (False, True) for low in (False, True))


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


def ours_optimizer(ours: Ours, work: Work, device: torch.device) -> MPOptimizer:
    """An MPOptimizer in one of the situations, its gradients in place."""
    parameters, dtype = _parameters(work, device), timing.low_beside(device)
    if ours.low:
        for parameter in parameters:
            assert parameter.grad is not None
            copies.copy_of(parameter, dtype)
            if dtype is torch.bfloat16:  # in FP16 gradients leave the graph divided by the scale
                low = parameter.grad.to(dtype)
                parameter.grad = None
                parameter.grad_dtype = None
                parameter.grad = low
    return MPOptimizer(
        torch.optim.AdamW(parameters, lr=RATE),
        loss_scale=LossScale.dynamic(init_scale=1.0, growth_interval=10**9),
        max_grad_norm=1.0 if ours.clip else None,
        emit=work.emit,
    )


def peer_step(peer: Peer, work: Work, device: torch.device) -> Callable[[], object]:
    """One step of a peer: with what comes before and after it, as `Peer` says."""
    parameters = _parameters(work, device)
    optimizer = torch.optim.AdamW(parameters, lr=RATE, fused=True)
    if not peer.scaled:
        return optimizer.step
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0, growth_interval=10**9)
    scaler.scale(torch.ones((), device=device))  # it makes its tensors when it is first used
    weights: list[Tensor] = list(parameters)
    low = (
        [torch.empty_like(p, dtype=timing.low_beside(device)) for p in weights] if peer.cast else []
    )

    def step() -> None:
        if peer.clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        if peer.cast:
            with torch.no_grad():
                torch._foreach_copy_(low, weights)

    return step


def measure_all(work: Work, device: torch.device) -> dict[str, list[float]]:
    """Arm's name -> seconds of a step, a sample a round: all arms in turns."""
    steps: dict[str, Callable[[], object]] = {
        **{ours.name: ours_optimizer(ours, work, device).step for ours in OURS},
        **{peer.name: peer_step(peer, work, device) for peer in PEERS},
    }
    for step in steps.values():
        for _ in range(3):  # the first makes AdamW's state, the second must find it there
            step()
    turns, wait = [timing.Arm(*one) for one in steps.items()], timing.idle_wait(device)
    return timing.take_turns(turns, rounds=work.rounds, steps=work.steps, wait=wait)


# -- report ----------------------------------------------------------------------------------------
# Ratios to the rivals, verdicts and tables.

OVER_SCALED = {"cpu": 1.15, "cuda": 1.3}

Ratios = dict[str, dict[str, timing.Ratio]]


def _rivals(ours: Ours) -> list[Peer]:
    """The peer that leaves behind what ours does; then those that do less."""
    casts = (True, False) if ours.low else (False,)
    return [*(Peer(ours.clip, cast) for cast in casts), ALONE]


def _ratios(seconds: dict[str, list[float]]) -> Ratios:
    def over(ours: Ours) -> dict[str, timing.Ratio]:
        rivals = (peer.name for peer in _rivals(ours))
        return {name: timing.ratio(seconds[name], seconds[ours.name]) for name in rivals}

    return {ours.name: over(ours) for ours in OURS}


def _step_table(seconds: dict[str, list[float]]) -> Table:
    rows = [(name, timing.summarize(samples).text()) for name, samples in seconds.items()]
    return Table("Step", ("arm", "ms"), rows)


def _ratio_table(ratios: Ratios) -> Table:
    rows = [
        (name, base, str(value), f"{value.of_medians:.2f}x")
        for name, group in ratios.items()
        for base, value in group.items()
    ]
    return Table("How many times faster", ("", "than", "", "of medians"), rows)


def _verdicts(ratios: Ratios, device: torch.device) -> Claims:
    target = OVER_SCALED[device.type]
    for ours in OURS:
        fair, *_ = _rivals(ours)
        times = ratios[ours.name][fair.name].paired
        claim = f"{ours.name} at least {target}x faster than {fair.name}: {times:.2f}x"
        yield claim, times >= target
