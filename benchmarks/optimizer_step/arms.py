"""What is compared: the sizes, the situations of ours, and the peers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mpcompile import LossScale, MPOptimizer
from mpcompile.scaling import copies

__all__ = [
    "COMPILED",
    "COPY",
    "OURS",
    "PEERS",
    "TINY",
    "Ours",
    "Peer",
    "Work",
    "ours_optimizer",
    "peer_step",
    "work_for",
]

RATE = 1e-4
COMPILED, COPY = "torch.compile(AdamW.step), no scaling", "memory copy"
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
    starts: bool = True

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


def work_for(device: torch.device) -> Work:
    """The full size on this type of device."""
    return CUDA if device.type == "cuda" else CPU


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
        loss_scale=scale,
        max_grad_norm=1.0 if ours.clip else None,
        emit=work.emit,
    )


def peer_step(peer: Peer, work: Work, device: torch.device) -> Callable[[], object]:
    """One step of a peer: with what comes before and after it, as `Peer` says."""
    parameters = _parameters(work, device)
    lr = torch.tensor(RATE, device=device) if peer.compile else RATE  # a float is a constant
    optimizer = torch.optim.AdamW(parameters, lr=lr, **peer.settings)
    if peer.compile:
        return torch.compile(optimizer.step, backend=work.emit)
    if not peer.scaled:
        return optimizer.step
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0, growth_interval=10**9)
    scaler.scale(torch.ones((), device=device))  # it makes its tensors when it is first used
    weights: list[Tensor] = list(parameters)
    low = [torch.empty_like(p, dtype=_low_dtype(device)) for p in weights] if peer.cast else []

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
