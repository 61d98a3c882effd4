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
from factories import nets, squeezed

import mpcompile
from mpcompile import cli
from mpcompile.devices.registry import capabilities
from mpcompile.preview.factory import CONTRACT
from mpcompile.profile import Profile, Sample, store
from mpcompile.profile.calls import Point

__all__ = ["nets"]

Captured = pytest.CaptureFixture[str]
SHARE = "--fail-under-tensor-core-share"


# -- info ------------------------------------------------------------------------------------------


def test_info_names_device_dtype_reason_and_torch(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        ("2.11.1", 1, "2.11.1 (NOT in the range >=2.12)"),
        ("2.99.0", 0, "2.99.0 (in the range >=2.12, newer than any tested)"),
    ],
)
def test_info_of_another_torch(
    version: str, status: int, said: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert cli.main(["info", "--device", "cpu"]) == status
    assert said in squeezed(capsys.readouterr().out)


# -- what can't be done ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "unknown device 'gpu': use auto, cpu, cuda or cuda:N"),
        ("cuda:99", "device 'cuda:99' is not there"),
        ("meta", "device type 'meta' is not supported; mpcompile works on cuda and cpu"),
    ],
)
@pytest.mark.parametrize("command", ["info", "demo", "profile", "diagnose some_nets:good"])
def test_a_device_that_cannot_be(command: str, name: str, message: str, capsys: Captured) -> None:
    assert cli.main([*command.split(), "--device", name]) == 2
    captured = capsys.readouterr()
    assert message in squeezed(captured.err)
    assert captured.out == ""


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("explain some_nets", "write the factory as pkg.module:factory"),
        ("plan some_nets.good", "did you mean some_nets:good?"),
        ("plan some_nets.py:good", "name the module, not its file; did you mean some_nets:good?"),
        ("plan ./some_nets.py:good", "name the module, not its file; did you mean some_nets:good?"),
        ("explain no_nets:good", "there is no module 'no_nets' in the current directory"),
        ("plan broken_nets:good", "broken_nets can't be imported: ModuleNotFoundError: No module "
         "named"),
        ("explain some_nets:godo", "some_nets has no 'godo'; did you mean 'good'?"),
        ("explain some_nets:number", "some_nets:number is a int, not a function"),
        ("explain some_nets:net", "some_nets:net is a Linear, not a function"),
        ("explain some_nets:fails", "some_nets:fails() fails: OSError: no such weights ("),
        ("explain some_nets:one", "returned a Linear; factory() must return (model, args) or"),
        ("explain some_nets:tensor", "returned a Tensor as args; factory() must return"),
        ("explain some_nets:swapped", "returned a tuple as the model; factory() must return"),
        ("explain some_nets:unnamed", f"returned a int as loss_fn; {CONTRACT}"),
        ("explain some_nets:five", "some_nets:five() returned 5 values; factory() must return"),
        # said before the factory is looked for
        ("explain no_nets:good --device h10", "unknown GPU 'h10'; did you mean 'h100'?"),
        ("explain some_nets:good --device cpu", "plan is for the device that the model is on"),
        ("explain some_nets:good --why nothing", "'nothing'"),
        ("explain some_nets:good --diff none.json", "none.json can't be read: No such file"),
        ("explain some_nets:good --diff some_nets.py", "some_nets.py is not a plan: not JSON"),
        ("diagnose some_nets:unnamed", f"nets:unnamed() returned a int as loss_fn; {CONTRACT}"),
        ("diagnose some_nets:lossless", "loss_fn returned a tensor of shape (8, 8): it must make"),
        ("diagnose some_nets:good --steps 0", "steps=0: give a whole number from 1"),
        ("diagnose some_nets:good --loss-scale dynamo", "loss_scale='dynamo': use 'dynamic', "),
        ("diagnose some_nets:good --loss-scale -1", "-1.0"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("nets")
def test_a_request_that_cannot_be_met(command: str, message: str, capsys: Captured) -> None:
    assert cli.main(command.split()) == 2
    captured = capsys.readouterr()
    assert message in squeezed(captured.err)
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("dance", "invalid choice: 'dance'"),
        ("demo --steps 1", "1: a whole number from 2 is needed"),
        ("demo --steps many", "many: a whole number from 2 is needed"),
        ("demo --dtype float8", "unknown dtype 'float8'"),
        ("demo --level O0", "invalid choice: 'O0'"),
        ("profile --seconds 0", "0: a number of seconds above 0 is needed"),
        ("profile --seconds soon", "soon: a number of seconds above 0 is needed"),
        ("profile --show --out x", "not allowed with argument"),
        ("profile --device cpu --out .", ". is a directory: name a file"),
        ("explain", "the following arguments are required: pkg.module:factory"),
        (f"explain a:b {SHARE} 95", "95: a share from 0 to 1 is needed, such as 0.95"),
        (f"explain a:b {SHARE} all", "all: a share from 0 to 1 is needed, such as 0.95"),
        ("explain a:b --level O0", "invalid choice: 'O0'"),
        ("explain a:b --html some_nets.py/plan.html", "some_nets.py/plan.html: File exists"),
        ("explain a:b --html .", ". is a directory: name a file"),
        ("explain a:b --why x --diff y.json", "not allowed with argument --why"),
        ("diagnose", "the following arguments are required: pkg.module:factory"),
        ("diagnose a:b --steps few", "argument --steps: invalid int value: 'few'"),
        ("diagnose a:b --level O0", "invalid choice: 'O0'"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("nets")
def test_bad_arguments(command: str, message: str, capsys: Captured) -> None:
    """They are said before the work begins."""
    with pytest.raises(SystemExit) as stop:
        cli.main(command.split())
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

    monkeypatch.setattr("mpcompile.cli.machine.measure", measure)
    monkeypatch.delenv(store.VARIABLE, raising=False)
    monkeypatch.setattr(store.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(store, "_loaded", {})
    return asked


def test_profile_measures_prints_and_stores(measured: list[float], capsys: Captured) -> None:
    assert cli.main(["profile", "--device", "cpu", "--seconds", "7"]) == 0
    assert measured == [7.0]
    path = store.cache_path(torch.device("cpu"))
    out = squeezed(capsys.readouterr().out)
    assert "batch 1, m 64, n 64, k 64" in out
    assert "1.50x" in out
    assert f"written to {path}" in out
    assert store.load(torch.device("cpu")) == store.read(path)


def test_profile_out_and_show(
    measured: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
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
    capsys: Captured,
) -> None:
    path = tmp_path / "p"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(store.VARIABLE, "none" if content == "none" else str(path))
    assert cli.main(["profile", "--device", "cpu", "--show"]) == 2
    err = re.sub(r"\s", "", capsys.readouterr().err)  # a long path is broken across lines
    assert re.sub(r"\s", "", message.format(path=path)) in err
