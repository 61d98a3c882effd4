"""`mpcompile check`: what is there is said, what is missing or fails is named by the status."""

import platform

import pytest
import torch
from factories import squeezed

from mpcompile import cli
from mpcompile.cli import machine
from mpcompile.devices.registry import capabilities
from mpcompile.torch_inside.private_names import GONE, Part

CHECK = ["check", "--device", "cpu"]
Out = pytest.CaptureFixture[str]


def test_what_is_said(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.setattr(machine, "_trained", lambda level, device: f"trained on {device}")
    assert cli.main(CHECK) == 0
    said = squeezed(capsys.readouterr().out)
    for expected in (
        f"Python {platform.python_version()}, torch {torch.__version__}, ",
        f"cpu: {capabilities('cpu').name()}; units: {capabilities('cpu').units()}",
        "private names of torch that are missing: none", "O1: trained on cpu", "O2: trained on cpu",
    ):  # fmt: skip
        assert expected in said


def test_dtypes_with_units(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(capabilities("cpu"))
    monkeypatch.setattr(kind, "units", lambda self: "some")
    monkeypatch.setattr(kind, "has_units", lambda self, dtype: dtype is torch.bfloat16)
    assert [line for line in machine._units() if line.endswith("units: some, for bfloat16")]


def test_a_missing_name(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    why = "cannot import name '_name' from 'torch._never_was'"
    monkeypatch.setattr(machine, "GONE", [(Part.INDUCTOR, why)])
    GONE.append((Part.INDUCTOR, why))
    try:
        assert cli.main(CHECK) == 1
    finally:
        GONE.remove((Part.INDUCTOR, why))
    said = squeezed(capsys.readouterr().out)
    assert f"{why}: {Part.INDUCTOR.value}" in said
    assert "O1: FAILED: MPCompileError: emit=" in said


def test_what_is_not_verified(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    real = machine.mpcompile
    monkeypatch.setattr(machine, "mpcompile", lambda what, **more: real(what, emit="eager", **more))
    assert cli.main(CHECK) == 1
    said = squeezed(capsys.readouterr().out)
    assert "O2: FAILED: MPCompileError: not all that was compiled is verified: nothing" in said


@pytest.mark.slow("compiles by Inductor")
def test_it_trains(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    assert cli.main(CHECK) == 0
    said = capsys.readouterr().out.splitlines()
    for line in said[-2:]:
        assert "forward: verified " in line
        assert "backward: verified " in line
    monkeypatch.setattr(machine, "_STEPS", 1)
    assert cli.main(CHECK) == 1
    assert "O1: FAILED: MPCompileError: it doesn't learn: loss " in capsys.readouterr().out
