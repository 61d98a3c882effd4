"""The measurement of a device profile: its schedule by a synthetic clock, its grid, its calls."""

from collections.abc import Callable

import pytest
import torch
from profiles import BF16, CPU, FP16, FP32

from mpcompile import MPCompileError
from mpcompile.profile import Sample
from mpcompile.profile.calls import Calls, Point, build, points
from mpcompile.profile.cost_model import DTYPES, KINDS, flops
from mpcompile.profile.measure import PART, measure


class Machine:
    """A clock that only calls move, and calls that take as long as `takes` says."""

    def __init__(self, takes: Callable[[Point, torch.dtype], float]) -> None:
        self.takes = takes
        self.now = 0.0
        self.log: list[tuple[Point, torch.dtype]] = []

    def clock(self) -> float:
        return self.now

    def build(self, point: Point, dtype: torch.dtype, device: torch.device) -> Calls:
        cost = self.takes(point, dtype)

        def run(times: int) -> None:
            self.log.append((point, dtype))
            self.now += times * cost

        return Calls(lambda: run(1), lambda: run(3))

    def measure(self, seconds: float, *sizes: int) -> dict[tuple[int, torch.dtype], Sample]:
        grid = [Point("gemm", (1, size, size, size)) for size in sizes]
        found = measure(CPU, seconds=seconds, points=grid, build=self.build, clock=self.clock)
        return {(s.dims[1], s.dtype): s for s in found.samples}


def by_work(point: Point, dtype: torch.dtype) -> float:
    return flops(point.kind, point.dims) * {FP32: 1e-11, BF16: 4e-12, FP16: 1e-9}[dtype]


def test_every_size_in_every_dtype_that_can() -> None:
    machine = Machine(by_work)
    found = machine.measure(100.0, 256, 64)
    assert set(found) == {(size, dtype) for size in (64, 256) for dtype in DTYPES}
    for (size, dtype), taken in found.items():
        expected = by_work(Point("gemm", (1, size, size, size)), dtype)
        assert (taken.forward, taken.total) == pytest.approx((expected, 3 * expected))
    assert machine.log[0][0].dims == (1, 64, 64, 64), "the small ones go first"


def test_a_dtype_that_is_far_too_slow_is_left_out_unasked() -> None:
    machine = Machine(by_work)
    found = machine.measure(60.0, 64, 128, 256, 512, 1024, 2048)
    assert (2048, BF16) in found
    assert (64, FP16) in found
    tried = {point.dims[1] for point, dtype in machine.log if dtype is FP16}
    assert tried == {64, 128, 256, 512}  # one call at 1024 would take 6.4 s
    assert machine.now < 61.0


def test_no_dtype_is_left_out_for_taking_as_long_as_fp32() -> None:
    machine = Machine(lambda point, dtype: 1.0 if dtype is FP32 else 1.5)
    found = machine.measure(8 * 3 / PART, 64, 128, 256)
    assert len(found) == 9


def test_time_that_runs_out_ends_the_run() -> None:
    machine = Machine(lambda point, dtype: 1e-5 * point.dims[1] ** 2)
    found = machine.measure(10.0, *range(1, 400, 4))
    assert 0 < len(found) < 300
    assert machine.now < 20.0
    with pytest.raises(MPCompileError, match=r"nothing could be measured in 0\.001 seconds"):
        machine.measure(0.001, 100)


def test_a_busy_moment_does_not_count() -> None:
    turns = iter(range(10**6))
    machine = Machine(lambda point, dtype: 1e-4)
    made = machine.build

    def disturbed(point: Point, dtype: torch.dtype, device: torch.device) -> Calls:
        quiet = made(point, dtype, device)

        def late(call: Callable[[], object]) -> None:
            call()
            if next(turns) % 3:
                machine.now += 0.01

        return Calls(lambda: late(quiet.forward), lambda: late(quiet.both))

    machine.build = disturbed  # type: ignore[method-assign]
    found = machine.measure(100.0, 64)
    assert found[64, BF16].forward == pytest.approx(1e-4)
    assert found[64, BF16].total == pytest.approx(3e-4)


def test_a_dtype_without_a_kernel_is_left_out() -> None:
    def takes(point: Point, dtype: torch.dtype) -> float:
        if dtype is BF16:
            raise RuntimeError('"addmm" not implemented for BFloat16')
        return by_work(point, dtype)

    assert {dtype for _, dtype in Machine(takes).measure(100.0, 64)} == {FP32, FP16}


@pytest.mark.slow("measures, or starts processes")
def test_progress_names_every_size() -> None:
    machine, seen = Machine(by_work), []
    measure(
        CPU, points=[Point("gemm", (1, 8, 8, 8)), Point("copy", (64,))],
        build=lambda p, dtype, device: machine.build(Point("gemm", (1, 8, 8, 8)), dtype, device),
        clock=machine.clock, progress=lambda point, done, of: seen.append((point.kind, done, of)),
    )  # fmt: skip
    assert seen == [("copy", 0, 2), ("gemm", 1, 2)]


@pytest.mark.parametrize("large", [False, True])
def test_the_grid_is_sound(large: bool) -> None:
    grid = points(large=large)
    assert len({(p.kind, p.dims) for p in grid}) == len(grid)
    assert {p.kind for p in grid} == set(KINDS)
    for point in grid:
        Sample(point.kind, FP32, point.dims, 1.0, 1.0)  # raises for dims that cannot be


SMALL = (
    Point("gemm", (1, 4, 5, 6)),
    Point("gemm", (2, 4, 5, 6)),
    Point("conv", (2, 4, 6, 9, 16, 2)),
    Point("conv", (2, 4, 6, 16, 16, 1), stride=4),
    Point("attention", (3, 8, 4, 8)),
    *(Point("rnn", (2, 3, 8, 8, gates)) for gates in (4, 3, 1)),
    Point("copy", (64,)),
)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("point", SMALL, ids=lambda p: f"{p.kind}-{p.dims}")
def test_what_is_timed_runs(point: Point, dtype: torch.dtype) -> None:
    made = build(point, dtype, CPU)
    output = made.forward()
    assert isinstance(output, torch.Tensor)
    assert output.dtype is dtype
    results = made.both()
    assert isinstance(results, tuple)
    assert all(r is None or (r.dtype is dtype and r.isfinite().all()) for r in results)


def test_what_is_timed_has_the_size_it_says() -> None:
    product, to_input, to_weight = build(Point("gemm", (1, 4, 5, 6)), FP32, CPU).both()  # type: ignore[misc]
    assert [tuple(t.shape) for t in (product, to_input, to_weight)] == [(4, 5), (4, 6), (5, 6)]
    stem = build(Point("conv", (2, 3, 8, 49, 16 * 16, 1), stride=2), FP32, CPU).forward()
    assert isinstance(stem, torch.Tensor)
    assert tuple(stem.shape) == (2, 8, 16, 16)
    assert stem.is_contiguous(memory_format=torch.channels_last)
    copied = build(Point("copy", (4096,)), BF16, CPU).forward()
    assert isinstance(copied, torch.Tensor)
    assert 2 * copied.nbytes == 4096
