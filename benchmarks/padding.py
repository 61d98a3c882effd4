"""Padding for Tensor Cores: step time without it, with Inductor's `pad_mm`, and with ours.

Three models whose sizes are odd, as the originals' are: a GPT with 50257 words, DLRM's towers (13
numbers, 27 features, 479, 367 and 1 wide), SSD's heads (81 classes for each anchor). The peers are
torch.compile under autocast, with `shape_padding` off and on; ours are `pad="never"`, `"auto"` and
`"always"`. On a CPU odd sizes cost nothing, so "auto" has to do nothing, and at no cost.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping

import torch
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache

from benchmarks.harness import timing
from benchmarks.harness.report import Claims, Report, Settings, Table, plain, where
from benchmarks.harness.ways import Way
from benchmarks.models import Detector, Recommender, Sample, tokens
from benchmarks.step_times import Begun, Timed, Work
from mpcompile import compiled_plans
from mpcompile.demo.gpt import GPT, GPTConfig


def run(settings: Settings) -> Report:
    """Time every model; under `settings.quick` small ones, once, without compiling."""
    device = settings.device
    full = CUDA if device.type == "cuda" else CPU
    work = TINY if settings.quick else full
    found = {timed.name: _measure(timed, work, device) for timed in work.models}
    return Report(
        title=f"Padding for Tensor Cores on {where(device)}",
        notes=_notes(work, device),
        tables=[_times(found), _ratios(found), _shares(found)],
        verdicts=dict(_verdicts(found, device)),
        data={"rounds": work.rounds, "models": plain(found)},
    )


# -- measure ---------------------------------------------------------------------------------------
# The models, and each of them timed under every arm.

NO_PADDING, PAD_MM = "compile, no padding", "compile, pad_mm"
NEVER, AUTO, ALWAYS = "mpcompile never", "mpcompile auto", "mpcompile always"
PEERS, OURS = (NO_PADDING, PAD_MM), (NEVER, AUTO, ALWAYS)


def _gpt(batch: int, steps: int, **sizes: int) -> Timed:
    config = GPTConfig(**{"vocab": 50257, **sizes})
    name = f"GPT, {config.layers} layers, width {config.width}, {config.vocab} words"
    sample = tokens(batch, config.context, config.vocab, config.vocab)
    return Timed(name, functools.partial(GPT, config), sample, steps)


def _dlrm(batch: int, steps: int) -> Timed:
    return Timed(f"DLRM, B{batch}", Recommender, Sample((batch, 13), (batch,), 2), steps)


def _ssd(batch: int, size: int, width: int, steps: int) -> Timed:
    sample = Sample((batch, 3, size, size), (batch, Detector.places(size)), 81)
    return Timed(
        f"SSD heads, B{batch}, {size} px", functools.partial(Detector, width=width), sample, steps
    )


CPU = Work(
    models=(_gpt(2, 1, context=64, width=128, layers=2, heads=4), _dlrm(512, 4), _ssd(1, 38, 64, 2))
)
# Of GPT-2's 12 layers four: its head is what is padded, and five arms compile them all.
CUDA = Work(
    models=(
        _gpt(8, 2, context=1024, width=768, layers=4, heads=12),
        _dlrm(16384, 10),
        _ssd(16, 76, 256, 4),
    )
)
TINY = Work(
    models=(
        _gpt(1, 1, vocab=61, context=8, width=32, layers=1, heads=2),
        _dlrm(4, 1),
        _ssd(1, 8, 8, 1),
    ),
    rounds=1,
    emit="eager",
)


@dataclasses.dataclass(frozen=True)
class Found:
    """What one model showed.

    Attributes:
        seconds: arm -> seconds per step, a sample a round.
        losses: arm -> the first step's.
        first: arm -> seconds of the first step, in which it is compiled.
        passes: arm of ours -> seconds in the padding passes.
        shares: arm of ours -> share of the FLOPs whose dims are aligned, as compiled.
        before: the same as captured.
    """

    seconds: dict[str, list[float]]
    losses: dict[str, float]
    first: dict[str, float]
    passes: dict[str, float]
    shares: dict[str, float]
    before: float


def _measure(timed: Timed, work: Work, device: torch.device) -> Found:
    torch._dynamo.reset()
    begun: dict[str, Begun] = {}
    losses, first = {}, {}
    wait = timing.idle_wait(device)
    for way in _ways(device, work.emit):
        arm = way.name
        begun[arm] = Begun(way, timed, work.emit, device)
        # A new cache, or "auto" would find what "never" has compiled. Inductor pads products on a
        # GPU itself unless it is told not to: the arms of ours would have its pads, too.
        with fresh_cache(), inductor.patch(shape_padding=arm == PAD_MM):
            start = time.perf_counter()
            losses[arm] = float(begun[arm].step())
            wait()
            first[arm] = time.perf_counter() - start
    turns = [timing.Arm(arm, one.step) for arm, one in begun.items()]
    seconds = timing.take_turns(turns, rounds=work.rounds, steps=timed.steps, wait=wait)
    plans = {arm: compiled_plans(begun[arm].model) for arm in OURS}
    shares = {arm: plan.tensor_cores.share for arm, (plan,) in plans.items()}
    passes = {
        arm: plan.seconds["plan_pads"] + plan.seconds["place_pads"]
        for arm, (plan,) in plans.items()
    }
    before = plans[NEVER][0].tensor_cores.share_before
    return Found(seconds, losses, first, passes, shares, before)


def _ways(device: torch.device, emit: str) -> list[Way]:
    low = timing.low_beside(device)
    # Inductor's own choice is made by timing; "auto" of ours times nothing.
    pads = ({"shape_padding": arm == PAD_MM} if emit == "inductor" else {} for arm in PEERS)
    peers = [
        Way(arm, low, compiled=True, scaled=False, options=pad)
        for arm, pad in zip(PEERS, pads, strict=True)
    ]
    ours = [
        Way(arm, low, "O1", scaled=False, options={"pad": arm.rpartition(" ")[2]}) for arm in OURS
    ]
    return [*peers, *ours]


# -- report ----------------------------------------------------------------------------------------
# Ratios to the peers and to no padding, verdicts and tables.

OVERHEAD = 0.03
"""What "auto" may cost on a CPU: of the step's time, and of the first step's."""
OVER_PEERS = 1.0
"""On CUDA, "auto" over the better peer."""


def _notes(work: Work, device: torch.device) -> list[str]:
    return [
        "A GPT with the 50257 words of GPT-2, DLRM's towers and products of features, SSD's heads. "
        "Inductor's pad_mm is for GPUs; on a CPU both peers are the same program.",
        "Forward (the loss is inside the compiled function) and backward on one batch, in "
        f"{'FP16' if device.type == 'cuda' else 'BF16'}. "
        f"{timing.how_compared(work.rounds, 'the arm')} Passes: ours that decide and "
        'place padding, as a share of the first step with "never", in which all is compiled.',
    ]


def _times(found: Mapping[str, Found]) -> Table:
    rows = [
        (
            name,
            arm,
            timing.summarize(samples).text(digits=2),
            f"{one.first[arm]:.1f}",
            f"{one.losses[arm]:.4f}",
        )
        for name, one in found.items()
        for arm, samples in one.seconds.items()
    ]
    columns = ("model", "arm", "forward + backward, ms", "first step, s", "first loss")
    return Table("Step", columns, rows)


def better_peer(seconds: Mapping[str, list[float]]) -> str:
    """The peer with the smaller median."""
    return min(PEERS, key=lambda peer: timing.summarize(seconds[peer]).median)


def over_peer(one: Found, arm: str) -> timing.Ratio:
    """How many times faster than the better peer."""
    return timing.ratio(one.seconds[better_peer(one.seconds)], one.seconds[arm])


def over_never(one: Found, arm: str) -> timing.Ratio:
    """How many times faster than ours without padding."""
    return timing.ratio(one.seconds[NEVER], one.seconds[arm])


def compile_overhead(one: Found) -> float:
    """The padding passes under "auto", as a share of the first step with "never"."""
    return (one.passes[AUTO] - one.passes[NEVER]) / one.first[NEVER]


def _ratios(found: Mapping[str, Found]) -> Table:
    rows = [
        (
            name,
            better_peer(one.seconds),
            *(str(over_peer(one, arm)) for arm in OURS),
            *(str(over_never(one, arm)) for arm in (AUTO, ALWAYS)),
        )
        for name, one in found.items()
    ]
    columns = ("model", "better peer", *OURS, "auto over never", "always over never")
    return Table("How many times faster than the better peer, and than never", columns, rows)


def _shares(found: Mapping[str, Found]) -> Table:
    rows = [
        (
            name,
            f"{one.before:.1%}",
            *(f"{one.shares[arm]:.1%}" for arm in (AUTO, ALWAYS)),
            f"{1e3 * one.passes[AUTO]:.0f}",
            f"{1e3 * one.passes[ALWAYS]:.0f}",
            f"{round(compile_overhead(one), 4) + 0.0:+.2%}",
        )
        for name, one in found.items()
    ]
    columns = (
        "model", "aligned as captured", "auto", "always", "passes of auto, ms",
        "passes of always, ms", "auto over never, of the first step",
    )  # fmt: skip
    return Table("FLOPs in aligned products, and what the passes take", columns, rows)


def _verdicts(found: Mapping[str, Found], device: torch.device) -> Claims:
    for name, one in found.items():
        if device.type == "cuda":
            fast = over_peer(one, AUTO).paired
            claim = f"{name}: auto at least {OVER_PEERS}x the better peer: {fast:.2f}x"
            yield claim, fast >= OVER_PEERS
            continue
        slower = 1 / over_never(one, AUTO).paired - 1
        claim = f"{name}: auto at most {OVERHEAD:.0%} slower than never: {slower:+.1%}"
        yield claim, slower <= OVERHEAD
        longer = compile_overhead(one)
        claim = f"{name}: auto's passes at most {OVERHEAD:.0%} of the first step: {longer:.2%}"
        yield claim, longer <= OVERHEAD
