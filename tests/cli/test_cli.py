"""The command line and the facts that `mpcompile info` prints."""

import dataclasses
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import squeezed

import mpcompile
from mpcompile import cli
from mpcompile.devices.registry import capabilities
from mpcompile.profile import Profile, Sample, store
from mpcompile.profile.calls import Point

# -- info ------------------------------------------------------------------------------------------


def test_info_names_device_dtype_reason_and_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    monkeypatch.setenv("HOME_OF_SECRETS", "secret")
    assert cli.main(["info", "--device", "cpu"]) == 0
    out = squeezed(capsys.readouterr().out)
    cpu = capabilities("cpu")
    for expected in (
        f"mpcompile {mpcompile.__version__}", f"torch {torch.__version__} (in the range >=2.12)",
        f"python {platform.python_version()} on {platform.system()}", f'dtype="auto" {cpu.auto}',
        cpu.why_auto(), cpu.units(), "oneDNN", "TORCHINDUCTOR_FREEZING 1",
    ):  # fmt: skip
        assert expected in out
    assert "secret" not in out


def test_info_says_when_torch_is_out_of_range(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.1")
    assert cli.main(["info", "--device", "cpu"]) == 1
    assert "2.11.1 (NOT in the range >=2.12)" in squeezed(capsys.readouterr().out)


def test_info_says_when_torch_is_newer_than_any_tested(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert cli.main(["info", "--device", "cpu"]) == 0
    said = squeezed(capsys.readouterr().out)
    assert "2.99.0 (in the range >=2.12, newer than any tested)" in said


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "unknown device 'gpu': use auto, cpu, cuda or cuda:N"),
        ("cuda:99", "device 'cuda:99' is not there"),
        ("meta", "device type 'meta' is not supported; mpcompile works on cuda and cpu"),
    ],
)
@pytest.mark.parametrize("command", ["info", "demo", "profile"])
def test_a_device_that_cannot_be(
    command: str, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "--device", name]) == 2
    captured = capsys.readouterr()
    assert message in squeezed(captured.err)
    assert captured.out == ""


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["demo", "--steps", "1"], "1: a whole number from 2 is needed"),
        (["demo", "--steps", "many"], "many: a whole number from 2 is needed"),
        (["demo", "--dtype", "float8"], "unknown dtype 'float8'"),
        (["demo", "--level", "O0"], "invalid choice: 'O0'"),
        (["profile", "--seconds", "0"], "0: a number of seconds above 0 is needed"),
        (["profile", "--seconds", "soon"], "soon: a number of seconds above 0 is needed"),
        (["profile", "--show", "--out", "x"], "not allowed with argument"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in squeezed(capsys.readouterr().err)


def test_the_version_needs_no_torch() -> None:
    code = (
        "import atexit, sys, mpcompile.cli; atexit.register(lambda: print('torch' in sys.modules))"
    )
    run = [sys.executable, "-c", f"{code}; mpcompile.cli.main(['--version'])"]
    said, modules = subprocess.check_output(run, text=True).splitlines()
    assert (said, "torch" in modules.split()) == (f"mpcompile {mpcompile.__version__}", False)


# -- profile ---------------------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces the measurement, and the user's cache; collects the seconds that were asked for."""
    asked: list[float] = []

    def measure(device: torch.device, *, seconds: float, progress: Any) -> Profile:
        asked.append(seconds)
        progress(Point("gemm", (1, 64, 64, 64)), 0, 1)
        low = Sample("gemm", torch.bfloat16, (1, 64, 64, 64), 1e-3, 2e-3)
        full = Sample("gemm", torch.float32, (1, 64, 64, 64), 1e-3, 3e-3)
        copies = [Sample("copy", t, (4096,), 1e-6, 1e-6) for t in (torch.float16, torch.float32)]
        samples = (*copies, low, full)
        return dataclasses.replace(store.empty_profile(device), samples=samples)

    monkeypatch.setattr(cli.machine, "measure", measure)
    monkeypatch.delenv(store.VARIABLE, raising=False)
    monkeypatch.setattr(store.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(store, "_loaded", {})
    return asked


def test_profile_measures_prints_and_stores(
    measured: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", "--device", "cpu", "--seconds", "7"]) == 0
    assert measured == [7.0]
    path = store.cache_path(torch.device("cpu"))
    out = squeezed(capsys.readouterr().out)
    assert "batch 1, m 64, n 64, k 64" in out
    assert "1.50x" in out
    assert f"written to {path}" in out
    assert store.load(torch.device("cpu")) == store.read(path)


def test_profile_out_and_show(
    measured: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "mine.json"
    assert cli.main(["profile", "--device", "cpu", "--out", str(path)]) == 0
    assert measured == [100.0]
    assert not store.cache_path(torch.device("cpu")).exists()
    capsys.readouterr()
    monkeypatch.setenv(store.VARIABLE, str(path))
    assert cli.main(["profile", "--device", "cpu", "--show"]) == 0
    assert "1.50x" in capsys.readouterr().out
    assert measured == [100.0], "nothing is measured to show a profile"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "{}",
            "MPCOMPILE_PROFILE: {path} holds no device profile: it is no JSON object with format 1"
            "; set a path, or 'none', or unset it",
        ),
        (None, "MPCOMPILE_PROFILE: can't read the profile {path}"),
        ("none", "there is no profile for cpu: MPCOMPILE_PROFILE=none holds none: unset it"),
    ],
)
def test_profile_show_has_nothing_to_show(
    content: str | None,
    message: str,
    measured: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "p"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(store.VARIABLE, "none" if content == "none" else str(path))
    assert cli.main(["profile", "--device", "cpu", "--show"]) == 2
    err = re.sub(r"\s", "", capsys.readouterr().err)  # a long path is broken across lines
    assert re.sub(r"\s", "", message.format(path=path)) in err


def test_profile_out_must_be_a_file(
    measured: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["profile", "--device", "cpu", "--out", str(tmp_path)])
    assert "is a directory: name a file" in squeezed(capsys.readouterr().err)
    assert not measured
