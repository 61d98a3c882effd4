"""What is compared: the sizes, the situations of ours, and the peers; their times and bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from benchmarks.harness.processes import starts
from benchmarks.harness.timing import Arm, idle_wait, low_beside, seconds_of, take_turns
from mpcompile import LossScale, MPOptimizer, ir
from mpcompile.scaling import copies

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


def _loss_scale() -> LossScale:
    return LossScale.dynamic(init_scale=1.0, growth_interval=10**9)


def ours_optimizer(ours: Ours, work: Work, device: torch.device) -> MPOptimizer:
    """An MPOptimizer in one of the situations, its gradients in place."""
    parameters = _parameters(work, device)
    scale, dtype = _loss_scale(), low_beside(device)
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
    low = [torch.empty_like(p, dtype=low_beside(device)) for p in weights] if peer.cast else []

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


# -- traffic ---------------------------------------------------------------------------------------
# Bytes that our step reads and writes, counted in the graphs that were compiled.


def bytes_moved(optimizer: MPOptimizer) -> int:
    """Bytes that its one step reads and writes, each input of a graph read once. torch's fused
    AdamW reads p, g, m and v and writes p, m and v, and g if that is clipped.
    """
    (step,) = optimizer._steps._steps.values()
    traced = step.traced
    gradients = [m.param.grad for m in step.key.members if m.param.grad is not None]
    norms = sum(g.numel() * g.element_size() for g in gradients)
    if traced.fused:
        return norms + sum(g.numel() for g in gradients) * (32 if traced.config.clipped else 28)
    return norms + sum(len(u.calls) * _bytes(u.graph) for u in traced.updates)


def _bytes(gm: fx.GraphModule) -> int:
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


# -- measure ---------------------------------------------------------------------------------------
# All arms in turns in this process, then first steps in processes of their own.


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
    step = "benchmarks.optimizer_step.measure:first_steps"
    names = (*(ours.name for ours in OURS), COMPILED)
    return {name: float(starts(1, step, name, device.type)[0]) for name in names}


def first_steps(name: str, kind: str) -> float:
    """What the fresh process does: two steps, timed. The first makes state and compiles."""
    device = torch.device(kind)
    work = work_for(device)
    ours = next((one for one in OURS if one.name == name), None)
    if ours:
        step: Callable[[], object] = ours_optimizer(ours, work, device).step
    else:
        step = peer_step(next(one for one in PEERS if one.name == name), work, device)
    return seconds_of(lambda: [step() for _ in range(2)], idle_wait(device))
