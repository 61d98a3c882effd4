"""The built-in device profiles: complete, true to themselves, and made as they say."""

from __future__ import annotations

import pytest
import torch
from profiles import BF16, FP16, FP32

from mpcompile.profile import store
from mpcompile.profile.ceilings import from_ceilings
from mpcompile.profile.key import Key
from mpcompile.profile.model import CEILINGS, KINDS


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


@pytest.mark.parametrize("stem", ["cpu-amx-bf16", "cpu-avx512-bf16", "cuda-hopper"])
def test_a_built_in_profile_is_complete(stem: str) -> None:
    profile = store.builtin(stem)
    assert stem.startswith(profile.device_type)
    measured = {(s.kind, s.dtype) for s in profile.samples}
    assert measured >= {(kind, dtype) for kind in KINDS for dtype in (FP32, BF16)}


@pytest.mark.parametrize("stem", ["cpu-amx-bf16", "cpu-avx512-bf16", "cuda-hopper"])
def test_a_built_in_profile_reproduces_itself(stem: str) -> None:
    profile = store.builtin(stem)
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
        assert full is not None
        assert low is not None
        return full / low

    assert gain(24) < 0.7
    assert gain(1024) > 2.0
