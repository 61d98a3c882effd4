"""Device profiles on disk: what a file must hold, and which file serves a device."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from profiles import BF16, CPU, FP32, profile_of

from mpcompile import MPCompileError
from mpcompile.devices.registry import capabilities
from mpcompile.errors import MPCompileWarning
from mpcompile.profile import Profile, Sample, load, store
from mpcompile.profile.calls import Point
from mpcompile.profile.cost_model import DTYPES
from mpcompile.profile.measure import measure


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
    return dataclasses.replace(store.empty_profile(CPU), samples=HERE.samples)


# -- files -----------------------------------------------------------------------------------------


def test_a_profile_survives_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "profile.json"
    store.write(HERE, path)
    assert store.read(path) == HERE
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format=2), "no JSON object with format 1"),
        (lambda d: d.pop("threads"), "the data of a Profile: Profile has no 'threads'"),
        (lambda d: d.update(threads=True), "Profile.threads is True, not of type int"),
        (lambda d: d.update(threads=-1), "threads -1"),
        (lambda d: d.update(device_type="tpu"), "device_type 'tpu'"),
        (lambda d: d.update(origin="hearsay"), "origin 'hearsay'"),
        (lambda d: d.update(samples=[]), "no samples"),
        (lambda d: d["samples"].append(7), r"samples\[2\] is 7, not of type dict"),
        (lambda d: d["samples"].append(d["samples"][0]), "two samples of one size"),
        (lambda d: d["samples"][0].update(dtype="float8"), "'float8', not of type dtype"),
        (lambda d: d["samples"][0].update(kind="gem"), "unknown kind 'gem'"),
        (lambda d: d["samples"][0].update(dims=[1, 2.5, 3, 4]), r"dims\[1\] is 2.5, not of"),
        (lambda d: d["samples"][0].update(dims=[1, 2, 3]), "for batch, m, n, k"),
        (lambda d: d["samples"][0].update(forward="1"), r"samples\[0\].forward is '1', not of"),
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
    assert load(CPU) is passed
    store.write(fitting(), path)
    assert load(CPU) == fitting()


def test_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names a profile, for devices of its type alone; or it switches profiles off."""
    store.write(fitting(), store.cache_path(CPU))
    store.write(HERE, tmp_path / "mine.json")
    store.write(Profile("a GPU", "cuda", "2.13.0", "", 0, HERE.samples), tmp_path / "gpu.json")
    for said, expected in (
        (str(tmp_path / "mine.json"), HERE), (str(tmp_path / "gpu.json"), fitting()), ("none", None)
    ):  # fmt: skip
        monkeypatch.setenv(store.VARIABLE, said)
        assert load(CPU) == expected


@pytest.mark.gpu
@pytest.mark.real_gpu("it has no driver whose version a profile could name")
def test_the_gpu_at_hand_can_be_measured() -> None:
    few = [Point("gemm", (1, 512, 512, 512)), Point("copy", (2**20,))]
    profile = measure(torch.device("cuda"), seconds=5.0, points=few)
    assert {s.dtype for s in profile.samples} == set(DTYPES)
    assert profile.driver
    store.write(profile, store.cache_path(torch.device("cuda")))
    assert load(torch.device("cuda")) == store.read(store.cache_path(torch.device("cuda")))
