"""A device profile's prediction: seconds of a call that was measured, or of one beside it. And the
built-in profiles: complete, true to themselves, and made as they say.
"""

import math
from typing import Any

import pytest
import torch
from profiles import BF16, FP16, FP32, from_ceilings, profile_of

from mpcompile import MPCompileError
from mpcompile.profile import Profile, Sample, store
from mpcompile.profile.cost_model import CEILINGS, KINDS

OVERHEAD, RATE, BANDWIDTH = 2e-6, 1e11, 1e10
GEMM = {"batch": 1, "m": 512, "n": 512, "k": 512}


def roofline(m: int, n: int, k: int, rate: float = RATE) -> float:
    """Seconds of a forward product on a device that is a roofline and nothing else."""
    return OVERHEAD + 2 * m * n * k / rate + 4 * (m * k + k * n + m * n) / BANDWIDTH


def sample(m: int, n: int, k: int, seconds: float, dtype: torch.dtype = FP32) -> Sample:
    return Sample("gemm", dtype, (1, m, n, k), seconds, 3 * seconds)


SIZES = (16, 64, 256, 1024)
COPY = Sample("copy", FP32, (2**28,), 2**28 / BANDWIDTH, 2**29 / BANDWIDTH)
IDEAL = profile_of(
    COPY, *(sample(m, n, k, roofline(m, n, k)) for m in SIZES for n in SIZES for k in SIZES)
)


def seconds(profile: Profile, *, backward: bool = True, **dims: int) -> float:
    return profile.seconds("gemm", FP32, {**GEMM, **dims}, backward=backward)


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


# -- the built-in ones -----------------------------------------------------------------------------


def test_the_ceilings_of_hopper() -> None:
    profile = store.builtin("cuda-hopper")
    again = from_ceilings(
        Profile("NVIDIA H200", "cuda", "", "", 0, ()),
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


@pytest.mark.parametrize("stem", ["cpu-amx-bf16", "cpu-avx512-bf16", "cuda-hopper"])
def test_a_built_in_profile_is_complete_and_reproduces_itself(stem: str) -> None:
    profile = store.builtin(stem)
    assert stem.startswith(profile.device_type)
    measured = {(s.kind, s.dtype) for s in profile.samples}
    assert measured >= {(kind, dtype) for kind in KINDS for dtype in (FP32, BF16)}
    for point in profile.samples:
        both = profile.seconds(point.kind, point.dtype, point.sizes)
        assert both == pytest.approx(point.total, rel=0.05), point


@pytest.mark.parametrize("stem", ["cpu-amx-bf16", "cpu-avx512-bf16"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_in_a_built_in_cpu_profile_four_times_the_rows_take_longer(
    dtype: torch.dtype, stem: str
) -> None:
    profile = store.builtin(stem)
    for width in (48, 96, 384, 768):
        times = [
            profile.seconds("gemm", dtype, {"batch": 1, "m": m, "n": width, "k": width})
            for m in (64, 256, 1024, 4096, 16384)
        ]
        assert times == sorted(times, key=float)


@pytest.mark.parametrize("stem", ["cpu-amx-bf16", "cpu-avx512-bf16"])
def test_a_built_in_cpu_profile_tells_small_from_large(stem: str) -> None:
    profile = store.builtin(stem)

    def gain(size: int) -> float:
        dims = {"batch": 1, "m": size, "n": size, "k": size}
        full, low = (profile.seconds("gemm", dtype, dims) for dtype in (FP32, BF16))
        return full / low

    assert gain(24) < 0.7
    assert gain(1024) > 2.0
