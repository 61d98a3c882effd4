"""DeepBench's products, convolutions and recurrent layers: FP32 against the low dtype.

The shapes are those of Baidu's DeepBench (training), which talks on mixed precision use as well.
Each is timed as it is named, and once more with every dim that padding looks at one smaller:
matrices 1759 wide in place of 1760. A call is a forward and its backward, in the form in which a
compiled program makes it and a profile measures it. Beside each ratio stands what the planner's
profile of this device says of the same call: it has measured other sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from benchmarks.harness import timing
from benchmarks.harness.report import Claims, Report, Settings, Table, paragraphs, plain, where
from mpcompile.profile import Profile, load
from mpcompile.profile.calls import Point, build
from mpcompile.profile.cost_model import KINDS


def run(settings: Settings) -> Report:
    """Time every shape that fits; under `settings.quick` three small ones, once."""
    device = settings.device
    work = QUICK if settings.quick else work_for(device)
    profile = load(device)
    found = {shape.name: _measure(shape, work, device, profile) for shape in work.shapes}
    return make_report(device, work, found)


# -- shapes ----------------------------------------------------------------------------------------
# The shapes, from code/kernels in DeepBench's repository, and what each is odd as.
#
# Left out: convolutions over rectangular spectrograms, since those of a profile are square.


@dataclasses.dataclass(frozen=True)
class Shape:
    """A call in two sizes.

    Attributes:
        name: with its dims, as DeepBench writes them.
        aligned: the size as named. DeepBench has some that nothing divides: 35 columns.
        odd: the same with one less in each dim that padding looks at.
    """

    name: str
    aligned: Point
    odd: Point


def _gemm(m: int, n: int, k: int) -> Shape:
    """(m, k) times (k, n): DeepBench's n is the batch, here the rows of what goes in."""
    aligned, odd = Point("gemm", (1, n, m, k)), Point("gemm", (1, n, m - 1, k - 1))
    return Shape(f"GEMM {m}x{n}x{k}", aligned, odd)


def _conv(
    side: int, channels: int, batch: int, filters: int, kernel: int, stride: int = 1
) -> Shape:
    positions = (side // stride) ** 2

    def at(inner: int, outer: int) -> Point:
        return Point("conv", (batch, inner, outer, kernel**2, positions, 1), stride)

    fewer = channels - 1 if channels > 3 else channels  # an image has three
    name = f"conv {side}x{side}x{channels}, N={batch}, K={filters}, {kernel}x{kernel}"
    name += f", stride {stride}" * (stride > 1)
    return Shape(name, at(channels, filters), at(fewer, filters - 1))


_CELLS = {4: "LSTM", 3: "GRU", 1: "RNN"}


def _rnn(gates: int, hidden: int, batch: int, steps: int) -> Shape:
    def at(width: int) -> Point:
        return Point("rnn", (batch, steps, width, width, gates))

    name = f"{_CELLS[gates]} {hidden}, N={batch}, T={steps}"
    return Shape(name, at(hidden), at(hidden - 1))


CPU_SHAPES = (
    *(_gemm(1760, n, 1760) for n in (16, 64, 128)),
    *(_gemm(2048, n, 2048) for n in (32, 128)),
    *(_gemm(2560, n, 2560) for n in (16, 64)),
    _gemm(35, 700, 2048), _gemm(35, 700, 2560), _gemm(3072, 64, 1024), _gemm(7680, 16, 2560),
    _conv(54, 64, 8, 64, 3), _conv(27, 128, 8, 128, 3), _conv(14, 128, 8, 256, 3),
    _conv(7, 256, 8, 512, 3), _conv(28, 192, 16, 32, 5), _conv(28, 192, 16, 64, 1),
    _conv(14, 512, 16, 192, 1), _conv(14, 512, 16, 48, 5), _conv(7, 832, 16, 256, 1),
    _conv(108, 3, 8, 64, 3, 2),
    _rnn(1, 1760, 16, 50), _rnn(4, 512, 16, 25), _rnn(4, 512, 64, 25), _rnn(4, 1024, 16, 25),
    _rnn(4, 256, 16, 150), _rnn(3, 1024, 32, 50),
)  # fmt: skip
"""What a step of on two cores takes tens of milliseconds. DeepBench's GRU has T=1500."""

CUDA_SHAPES = (
    *CPU_SHAPES,
    *(_gemm(width, 7000, width) for width in (1760, 2048, 2560, 4096)),
    _gemm(5124, 9124, 1760), _gemm(5124, 9124, 2560), _gemm(35, 8457, 2048),
    _conv(112, 64, 8, 128, 3), _conv(56, 128, 8, 256, 3), _conv(28, 256, 8, 512, 3),
    _conv(224, 3, 16, 64, 7, 2),
    _rnn(1, 2560, 64, 50), _rnn(4, 2048, 64, 25), _rnn(4, 4096, 32, 25), _rnn(3, 2816, 32, 200),
)  # fmt: skip

QUICK_SHAPES = (_gemm(16, 8, 16), _conv(8, 16, 2, 8, 3), _rnn(3, 16, 2, 3))


# -- measure ---------------------------------------------------------------------------------------
# Each shape in FP32 and the low dtype, aligned and odd, in turns.

FULL, LOW = "FP32", "low"
ODD = "odd "
"""Before the name of an arm."""
ARMS = (FULL, LOW, ODD + FULL, ODD + LOW)


@dataclasses.dataclass(frozen=True)
class Work:
    """What is timed, and how often.

    Attributes:
        seconds: that a turn should take.
    """

    shapes: Sequence[Shape]
    rounds: int = 15
    seconds: float = 0.04


QUICK = Work(QUICK_SHAPES, rounds=1, seconds=0.0)


@dataclasses.dataclass(frozen=True)
class Found:
    """What one shape showed. Each mapping is by the arm's name.

    Attributes:
        seconds: of a forward and its backward, a sample a round.
        left_out: seconds of one call, ten times slower than the fastest; it was timed once.
        predicted: seconds that the profile says; None without a profile that knows the call.
    """

    seconds: Mapping[str, list[float]]
    left_out: Mapping[str, float]
    predicted: Mapping[str, float | None]


def work_for(device: torch.device) -> Work:
    return Work(CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES)


def _measure(shape: Shape, work: Work, device: torch.device, profile: Profile | None) -> Found:
    low, wait = timing.low_beside(device), timing.idle_wait(device)
    calls = {
        FULL: (shape.aligned, torch.float32),
        LOW: (shape.aligned, low),
        ODD + FULL: (shape.odd, torch.float32),
        ODD + LOW: (shape.odd, low),
    }
    arms = [timing.Arm(arm, build(*call, device).both) for arm, call in calls.items()]
    for arm in arms:
        arm.step()  # kernels are chosen, and weights packed, in the first call
    left_out = timing.far_behind(arms, wait=wait)
    kept = [arm for arm in arms if arm.name not in left_out]
    one = timing.take_turns(kept, rounds=2, steps=1, wait=wait)
    steps = max(1, round(work.seconds / min(map(min, one.values()))))
    return Found(
        seconds=timing.take_turns(kept, rounds=work.rounds, steps=steps, wait=wait),
        left_out=left_out,
        predicted={arm: _predicted(profile, *call) for arm, call in calls.items()},
    )


def _predicted(profile: Profile | None, point: Point, dtype: torch.dtype) -> float | None:
    if profile is None:
        return None
    return profile.seconds(
        point.kind, dtype, dict(zip(KINDS[point.kind].dims, point.dims, strict=True))
    )


# -- report ----------------------------------------------------------------------------------------
# Ratios of the dtypes and of the sizes, measured and as the profile says; the slowest first.

CLEAR = 1.1
"""A difference from which on it matters which of two dtypes is chosen."""


def make_report(device: torch.device, work: Work, found: Mapping[str, Found]) -> Report:
    """The whole report."""
    low = str(timing.low_beside(device)).removeprefix("torch.")
    how = (
        f"The low dtype is {low}. {timing.how_compared(work.rounds, 'the first')} A call that "
        "takes ten times as long as the fastest was timed once."
    )
    return Report(
        title=f"DeepBench's shapes, {low} against FP32, on {where(device)}",
        notes=[*paragraphs(__doc__), how],
        tables=[_ratios(found), _times(found)],
        verdicts=dict(_verdicts(found)),
        data={"rounds": work.rounds, "shapes": plain(found)},
    )


def _gain(one: Found, base: str, arm: str) -> float:
    """How many times faster `arm` is than `base`."""
    if base in one.seconds and arm in one.seconds:
        return timing.ratio(one.seconds[base], one.seconds[arm]).paired
    return _seconds(one, base) / _seconds(one, arm)


def _seconds(one: Found, arm: str) -> float:
    return one.left_out[arm] if arm in one.left_out else timing.summarize(one.seconds[arm]).median


def _told(one: Found, base: str, arm: str) -> float | None:
    """What the profile says that `_gain` is."""
    before, after = one.predicted[base], one.predicted[arm]
    return None if before is None or after is None else before / after


def _ratios(found: Mapping[str, Found]) -> Table:
    pairs = ((FULL, LOW), (ODD + FULL, ODD + LOW), (ODD + LOW, LOW), (ODD + FULL, FULL))
    columns = ["shape"]
    for base, arm in pairs:
        columns += [f"{arm} over {base}", "profile"]
    rows = [
        (name, *(cell for pair in pairs for cell in _cells(one, *pair)))
        for name, one in sorted(found.items(), key=lambda item: _gain(item[1], FULL, LOW))
    ]
    return Table("How many times faster", tuple(columns), rows)


def _cells(one: Found, base: str, arm: str) -> tuple[str, str]:
    told = _told(one, base, arm)
    known = base in one.seconds and arm in one.seconds
    gain = str(timing.ratio(one.seconds[base], one.seconds[arm])) if known else (
        f"{_gain(one, base, arm):.2f}x"
    )  # fmt: skip
    return gain, "" if told is None else f"{told:.2f}x"


def _times(found: Mapping[str, Found]) -> Table:
    rows = [
        (name, *(_time(one, arm) for arm in ARMS))
        for name, one in found.items()
    ]  # fmt: skip
    return Table("A forward and its backward, ms", ("shape", *ARMS), rows)


def _time(one: Found, arm: str) -> str:
    if arm in one.left_out:
        return f"{1e3 * one.left_out[arm]:.1f}, once"
    return timing.summarize(one.seconds[arm]).text(digits=2)


def _verdicts(found: Mapping[str, Found]) -> Claims:
    """Where it matters, the profile chooses the dtype that is faster."""
    for name, one in found.items():
        told, gain = _told(one, FULL, LOW), _gain(one, FULL, LOW)
        if told is not None and not 1 / CLEAR < gain < CLEAR:
            numbers = f"{gain:.2f}x, it says {told:.2f}x"
            claim = f"{name}: the profile names the faster dtype: {numbers}"
            yield claim, (told > 1) == (gain > 1)
