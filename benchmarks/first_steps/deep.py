"""The first step of a deep GPT in a fresh process: compiled whole, by its blocks, and as a step."""

from __future__ import annotations

import dataclasses
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.processes import starts
from benchmarks.harness.timing import idle_wait, seconds_of
from mpcompile import MPOptimizer, mpcompile
from mpcompile.demo import GPT, GPTConfig

PEER = "torch.compile(model)"
REGIONAL = "mpcompile(model, regional=True)"
STEP = "mpcompile(train_step)"
_BACKEND = 'torch.compile(block, backend="mpcompile")'
ARMS = (
    PEER, "torch.compile(block)", "mpcompile(model)", REGIONAL, _BACKEND, "mpcompile(block)", STEP,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Deep:
    """A GPT of equal blocks, and how often each arm starts with it."""

    layers: int
    width: int
    arms: Sequence[str]
    rounds: int
    emit: str = "inductor"


DEEP = Deep(layers=24, width=128, arms=ARMS, rounds=3)
SHALLOW = Deep(layers=2, width=16, arms=(PEER, REGIONAL), rounds=1, emit="eager")


@dataclasses.dataclass(frozen=True)
class First:
    """Seconds of first steps with empty caches, and with those that they have left; by round."""

    cold: list[float]
    warm: list[float]

    def over(self, peer: First) -> tuple[float, float]:
        """The medians, cold and warm, of how many times as long as the peer's it took."""
        pairs = (self.cold, peer.cold), (self.warm, peer.warm)
        cold, warm = (
            statistics.median(map(operator.truediv, ours, theirs)) for ours, theirs in pairs
        )
        return cold, warm


def measure_deep(deep: Deep, device: torch.device) -> dict[str, First]:
    """All arms in turn, `deep.rounds` times, each start in a process of its own."""
    found = {arm: First([], []) for arm in deep.arms}
    step = "benchmarks.first_steps.deep:first_step"
    for _ in range(deep.rounds):
        for arm, seconds in found.items():
            how = (arm, device.type, deep.layers, deep.width, deep.emit)
            for seen, spent in zip(
                (seconds.cold, seconds.warm), starts(2, step, *how), strict=True
            ):
                seen.append(spent)
    return found


def first_step(arm: str, kind: str, layers: int, width: int, emit: str) -> float:
    """What the fresh process does: seconds of a step, with all that is compiled for it."""
    device = torch.device(kind)
    torch.manual_seed(0)
    config = GPTConfig(context=64, width=width, layers=layers, heads=4)
    model = GPT(config).to(device)
    words = torch.randint(config.vocab, (2, config.context), device=device)
    # What every compiler imports and starts first is no part of it.
    torch.compile(nn.Identity(), backend=emit)(torch.zeros(1, device=device))
    return seconds_of(lambda: _made(arm, model, device, emit)(words), idle_wait(device))


def _made(arm: str, model: GPT, device: torch.device, emit: str) -> Callable[[Tensor], Any]:
    """A training step in BF16, forward to `zero_grad`."""
    options: Mapping[str, Any] = {"dtype": torch.bfloat16, "emit": emit}
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
    blocks: Sequence[nn.Module] = list(model.blocks)
    is_peer = arm in (PEER, "torch.compile(block)")
    theirs: Any = torch.autocast(device.type, torch.bfloat16) if is_peer else nullcontext()
    if arm == PEER:
        model.compile(backend=emit)
    elif arm == _BACKEND:
        for block in blocks:
            block.compile(backend="mpcompile", options=dict(options))
    elif arm == "torch.compile(block)":
        for block in blocks:
            block.compile(backend=emit)
    elif arm == "mpcompile(block)":
        for block in blocks:
            mpcompile(block, **options)
    elif arm != STEP:
        mpcompile(model, **options, regional=arm == REGIONAL)
    else:
        optimizer = MPOptimizer(torch.optim.AdamW(model.parameters()), emit=emit)

    def train(words: Tensor) -> Tensor:
        with theirs:
            loss: Tensor = model(words, words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return mpcompile(train, **options) if arm == STEP else train
