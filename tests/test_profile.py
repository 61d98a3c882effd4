"""The device profile: the prediction, the measurement with a synthetic clock, the files."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mpcompile import MPCompileError
from mpcompile.devices.registry import capabilities
from mpcompile.errors import MPCompileWarning
from mpcompile.profile import Profile, Sample, load, store
from mpcompile.profile.calls import Calls, build
from mpcompile.profile.ceilings import from_ceilings
from mpcompile.profile.grid import Point, points
from mpcompile.profile.key import Key, key_of
from mpcompile.profile.measure import PART, measure
from mpcompile.profile.model import CEILINGS, DTYPES, KINDS, flops, merge

FP32, BF16, FP16 = DTYPES
CPU = torch.device("cpu")
OVERHEAD, RATE, BANDWIDTH = 2e-6, 1e11, 1e10
GEMM = {"batch": 1, "m": 512, "n": 512, "k": 512}


def roofline(m: int, n: int, k: int, rate: float = RATE) -> float:
    """Seconds of a forward product on a device that is a roofline and nothing else."""
    return OVERHEAD + 2 * m * n * k / rate + 4 * (m * k + k * n + m * n) / BANDWIDTH


def sample(m: int, n: int, k: int, seconds: float, dtype: torch.dtype = FP32) -> Sample:
    return Sample("gemm", dtype, (1, m, n, k), seconds, 3 * seconds)


def profile_of(*samples: Sample) -> Profile:
    return Profile("a CPU", "cpu", "2.13.0", "", 2, samples)


SIZES = (16, 64, 256, 1024)
COPY = Sample("copy", FP32, (2**28,), 2**28 / BANDWIDTH, 2**29 / BANDWIDTH)
IDEAL = profile_of(
    COPY, *(sample(m, n, k, roofline(m, n, k)) for m in SIZES for n in SIZES for k in SIZES)
)


def seconds(profile: Profile, *, backward: bool = True, **dims: int) -> float:
    found = profile.seconds("gemm", FP32, {**GEMM, **dims}, backward=backward)
    assert found is not None
    return found


# -- the prediction --------------------------------------------------------------------------------


def test_a_measured_point_comes_back() -> None:
    scattered = [sample(m, 4096 // m, 64, 1e-5 * (1 + m % 7)) for m in (4, 16, 64, 256)]
    profile = profile_of(*scattered)
    for point in scattered:
        forward = profile.seconds("gemm", FP32, point.sizes, backward=False)
        both = profile.seconds("gemm", FP32, point.sizes)
        assert forward == pytest.approx(point.forward, rel=1e-3)
        assert both == pytest.approx(point.total, rel=1e-3)


@pytest.mark.parametrize("dims", [(32, 100, 700), (512, 512, 512), (2048, 4099, 1024), (8, 8, 8)])
def test_a_roofline_is_found_again(dims: tuple[int, int, int]) -> None:
    m, n, k = dims
    assert seconds(IDEAL, m=m, n=n, k=k, backward=False) == pytest.approx(roofline(*dims), rel=0.3)


def test_a_slow_region_is_slow_for_its_neighbours_only() -> None:
    others = (s for s in IDEAL.samples if s.dims != (1, 64, 64, 64))
    profile = profile_of(sample(64, 64, 64, 1e-3), *others)
    assert seconds(profile, m=70, n=60, k=64) > 20 * seconds(IDEAL, m=70, n=60, k=64)
    assert seconds(profile, m=900, n=900, k=900) < 1.1 * seconds(IDEAL, m=900, n=900, k=900)


@pytest.mark.parametrize("dim", ["batch", "m", "n", "k"])
def test_more_work_never_takes_less_time(dim: str) -> None:
    times = [seconds(IDEAL, **{dim: 2**power}) for power in range(15)]
    assert times == sorted(times)


def test_beyond_the_measured_range_time_grows_with_the_work() -> None:
    double = seconds(IDEAL, m=2**15) / seconds(IDEAL, m=2**14)
    assert double == pytest.approx(2.0, rel=0.01)


def test_a_backward_takes_what_is_left() -> None:
    assert seconds(IDEAL) == pytest.approx(3 * seconds(IDEAL, backward=False), rel=1e-6)
    cheap = profile_of(Sample("gemm", FP32, (1, 8, 8, 8), 1e-5, 1e-5))
    assert seconds(cheap, m=4000) >= seconds(cheap, m=4000, backward=False)


def test_what_was_not_measured_is_none() -> None:
    assert IDEAL.seconds("gemm", BF16, GEMM) is None
    assert IDEAL.seconds("gemm", torch.float64, GEMM) is None
    assert IDEAL.seconds("rnn", FP32, dict.fromkeys(KINDS["rnn"].dims, 8)) is None


def test_an_empty_tensor_costs_about_a_call() -> None:
    assert OVERHEAD < seconds(IDEAL, m=0, n=16, k=16) < 10 * OVERHEAD


def test_a_request_that_makes_no_sense() -> None:
    with pytest.raises(MPCompileError, match=r"unknown kind 'gemv'.*did you mean 'gemm'"):
        IDEAL.seconds("gemv", FP32, GEMM)
    with pytest.raises(MPCompileError, match="gemm has the dims batch, m, n, k; got m, n"):
        IDEAL.seconds("gemm", FP32, {"m": 1, "n": 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dims": (1, 2, 3)}, "for batch, m, n, k"),
        ({"dims": (1, 2, 0, 3)}, "for batch, m, n, k"),
        ({"dtype": torch.float64}, "float32, bfloat16, float16"),
        ({"forward": 0.0}, "need 0 < forward <= both"),
        ({"forward": 2.0}, "need 0 < forward <= both"),
        ({"total": math.inf}, "need 0 < forward <= both"),
        ({"total": math.nan}, "need 0 < forward <= both"),
    ],
)
def test_a_sample_that_cannot_be(change: dict[str, Any], message: str) -> None:
    fields = {"kind": "gemm", "dtype": FP32, "dims": (1, 2, 3, 4), "forward": 1.0, "total": 1.5}
    with pytest.raises(MPCompileError, match=message):
        Sample(**{**fields, **change})


def test_runs_merge_to_the_fastest_of_each_point() -> None:
    first = profile_of(sample(8, 8, 8, 3e-6), sample(16, 16, 16, 4e-6))
    second = profile_of(sample(8, 8, 8, 2e-6), sample(32, 32, 32, 9e-6))
    best = {s.dims[1]: s.forward for s in merge([first, second]).samples}
    assert best == {8: 2e-6, 16: 4e-6, 32: 9e-6}
    other = Profile("another CPU", "cpu", "2.13.0", "", 2, first.samples)
    for runs in ([first, other], []):
        with pytest.raises(MPCompileError, match="profiles of one device"):
            merge(runs)


# -- the measurement -------------------------------------------------------------------------------


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

    def busy(point: Point, dtype: torch.dtype) -> float:
        return 1e-4

    machine = Machine(busy)
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
    machine = Machine(by_work)
    made = machine.build

    def refusing(point: Point, dtype: torch.dtype, device: torch.device) -> Calls:
        if dtype is BF16:
            raise RuntimeError('"addmm" not implemented for BFloat16')
        return made(point, dtype, device)

    machine.build = refusing  # type: ignore[method-assign]
    assert {dtype for _, dtype in machine.measure(100.0, 64)} == {FP32, FP16}


def test_progress_names_every_size() -> None:
    machine, seen = Machine(by_work), []
    measure(
        CPU,
        points=[Point("gemm", (1, 8, 8, 8)), Point("copy", (64,))],
        dtypes=[FP32],
        build=lambda p, dtype, device: machine.build(Point("gemm", (1, 8, 8, 8)), dtype, device),
        clock=machine.clock,
        progress=lambda point, done, of: seen.append((point.kind, done, of)),
    )
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


# -- files -----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(store.VARIABLE, raising=False)
    monkeypatch.setattr(
        store.platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name
    )
    monkeypatch.setattr(store, "_loaded", {})


HERE = profile_of(
    Sample("gemm", FP32, (1, 8, 8, 8), 1.25e-6, 3.75e-6),
    Sample("gemm", BF16, (1, 8, 8, 8), 1.5e-6, 4.5e-6),
)


def fitting() -> Profile:
    return key_of(CPU).profile(HERE.samples)


def test_a_profile_survives_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "profile.json"
    store.write(HERE, path)
    assert store.read(path) == HERE
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format=2), "no JSON object with format 1"),
        (lambda d: d.pop("threads"), "the profile must have the fields device, device_type"),
        (lambda d: d.update(extra=1), "the profile must have the fields"),
        (lambda d: d.update(threads=True), "threads must be int"),
        (lambda d: d.update(threads=-1), "threads -1"),
        (lambda d: d.update(device_type="tpu"), "device_type 'tpu'"),
        (lambda d: d.update(origin="hearsay"), "origin 'hearsay'"),
        (lambda d: d.update(samples=[]), "no samples"),
        (lambda d: d["samples"].append(7), "sample 2 must have the fields kind, dtype, dims"),
        (lambda d: d["samples"].append(d["samples"][0]), "two samples of one size"),
        (lambda d: d["samples"][0].update(dtype="float8"), "dtype 'float8'"),
        (lambda d: d["samples"][0].update(kind="gem"), "unknown kind 'gem'"),
        (lambda d: d["samples"][0].update(dims=[1, 2.5, 3, 4]), "sample 0: dims"),
        (lambda d: d["samples"][0].update(dims=[1, 2, 3]), "for batch, m, n, k"),
        (lambda d: d["samples"][0].update(forward="1"), "sample 0: forward must be float"),
        (lambda d: d["samples"][0].update(forward=math.inf), "need 0 < forward"),
    ],
)
def test_a_file_is_checked_in_full(
    change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    store.write(HERE, path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(MPCompileError, match=message) as raised:
        store.read(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"__import__('os')"])
def test_what_is_no_profile_at_all(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(MPCompileError, match="holds no device profile"):
        store.read(path)
    with pytest.raises(MPCompileError, match="can't read the profile"):
        store.read(tmp_path / "missing.json")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MPCompileError, match="can't write the profile"):
        store.write(HERE, tmp_path / "file" / "profile.json")


# -- which profile ---------------------------------------------------------------------------------


def test_the_one_measured_here_comes_before_the_built_in_one() -> None:
    stem = capabilities(CPU).builtin_profile()
    assert load(CPU) == (None if stem is None else store.builtin(stem))
    store.write(fitting(), store.cache_path(CPU))
    assert load(CPU) == fitting()
    assert load(CPU) is load(CPU), "a file is read once"


def test_another_number_of_threads_is_another_profile() -> None:
    store.write(fitting(), store.cache_path(CPU))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert load(CPU) != fitting()
    finally:
        torch.set_num_threads(threads)
    assert load(CPU) == fitting()


def test_a_file_of_another_device_under_our_name_is_not_used() -> None:
    store.write(HERE, store.cache_path(CPU))
    assert load(CPU) != HERE


def test_a_damaged_file_in_the_cache_warns_once_and_is_passed_over() -> None:
    path = store.cache_path(CPU)
    store.write(fitting(), path)
    path.write_text(path.read_text()[:-20])
    with pytest.warns(MPCompileWarning, match="holds no device profile.*passed over"):
        passed = load(CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(CPU) is passed
    store.write(fitting(), path)
    assert load(CPU) == fitting()


def test_the_variable_names_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.json"
    store.write(HERE, path)
    store.write(fitting(), store.cache_path(CPU))
    monkeypatch.setenv(store.VARIABLE, str(path))
    assert load(CPU) == HERE


def test_the_variable_is_for_devices_of_its_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpu.json"
    store.write(Profile("a GPU", "cuda", "2.13.0", "", 0, HERE.samples), path)
    store.write(fitting(), store.cache_path(CPU))
    monkeypatch.setenv(store.VARIABLE, str(path))
    assert load(CPU) == fitting()


def test_the_variable_switches_profiles_off(monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(fitting(), store.cache_path(CPU))
    monkeypatch.setenv(store.VARIABLE, "none")
    assert load(CPU) is None


def test_the_variable_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "missing.json"))
    with pytest.raises(MPCompileError, match=r"MPCOMPILE_PROFILE: can't read.*'none', or unset"):
        load(CPU)
    (tmp_path / "missing.json").write_text("{}")
    with pytest.raises(MPCompileError, match=r"MPCOMPILE_PROFILE: .* holds no device profile"):
        load(CPU)


@pytest.mark.parametrize(("capability", "stem"), [((9, 0), "cuda-hopper"), ((8, 0), None)])
def test_the_class_of_a_gpu(
    capability: tuple[int, int], stem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert capabilities("cuda").builtin_profile() == stem


def test_a_device_without_profiles() -> None:
    with pytest.raises(MPCompileError, match="device type 'meta' is not supported"):
        load(torch.device("meta"))


@pytest.mark.gpu
def test_the_gpu_at_hand_can_be_measured() -> None:
    few = [Point("gemm", (1, 512, 512, 512)), Point("copy", (2**20,))]
    profile = measure(torch.device("cuda"), seconds=5.0, points=few)
    assert {s.dtype for s in profile.samples} == set(DTYPES)
    assert profile.driver
    store.write(profile, store.cache_path(torch.device("cuda")))
    assert load(torch.device("cuda")) == store.read(store.cache_path(torch.device("cuda")))


# -- the built-in profiles -------------------------------------------------------------------------


def test_the_ceilings_of_hopper() -> None:
    profile = store.builtin("cuda-hopper")
    again = from_ceilings(
        Key("NVIDIA H200", "cuda", "", "", 0),
        bandwidth=4.3e12,
        rates={FP32: 50e12, BF16: 790e12, FP16: 790e12},
        launch=5e-6,
    )
    assert profile.origin == CEILINGS
    assert [(s.kind, s.dtype, s.dims) for s in profile.samples] == [
        (s.kind, s.dtype, s.dims) for s in again.samples
    ]
    for ours, theirs in zip(profile.samples, again.samples, strict=True):
        assert (ours.forward, ours.total) == pytest.approx((theirs.forward, theirs.total), rel=1e-3)
    dims = {"batch": 1, "m": 16384, "n": 4096, "k": 4096}
    found = profile.seconds("gemm", FP16, dims, backward=False)
    assert found == pytest.approx(2 * 16384 * 4096 * 4096 / 790e12, rel=0.15)
    assert profile.seconds("copy", FP16, {"bytes": 43 * 10**8}, backward=False) == pytest.approx(
        1e-3, rel=0.05
    )


@pytest.mark.parametrize("stem", ["cpu-avx512-bf16", "cuda-hopper"])
def test_a_built_in_profile_is_complete(stem: str) -> None:
    profile = store.builtin(stem)
    assert stem.startswith(profile.device_type)
    measured = {(s.kind, s.dtype) for s in profile.samples}
    assert measured >= {(kind, dtype) for kind in KINDS for dtype in (FP32, BF16)}


@pytest.mark.parametrize("stem", ["cpu-avx512-bf16", "cuda-hopper"])
def test_a_built_in_profile_reproduces_itself(stem: str) -> None:
    profile = store.builtin(stem)
    for point in profile.samples:
        both = profile.seconds(point.kind, point.dtype, point.sizes)
        assert both == pytest.approx(point.total, rel=0.05), point


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_in_the_built_in_cpu_profile_four_times_the_rows_take_longer(dtype: torch.dtype) -> None:
    profile = store.builtin("cpu-avx512-bf16")
    for width in (48, 96, 384, 768):
        times = [
            profile.seconds("gemm", dtype, {"batch": 1, "m": m, "n": width, "k": width})
            for m in (64, 256, 1024, 4096, 16384)
        ]
        assert times == sorted(times, key=float)


def test_the_built_in_cpu_profile_tells_small_from_large() -> None:
    profile = store.builtin("cpu-avx512-bf16")

    def gain(size: int) -> float:
        dims = {"batch": 1, "m": size, "n": size, "k": size}
        full, low = (profile.seconds("gemm", dtype, dims) for dtype in (FP32, BF16))
        assert full is not None
        assert low is not None
        return full / low

    assert gain(24) < 0.7
    assert gain(1024) > 2.0
