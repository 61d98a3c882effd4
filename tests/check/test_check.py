"""`mpcompile check`: what is right passes, and what is compiled wrongly, or raises, is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import SUPPORT
from torch import nn, optim

from mpcompile import cli
from mpcompile.check import run
from mpcompile.check.models import MODELS, Model
from mpcompile.check.run import Result, tried
from mpcompile.cli import check as command

CPU = torch.device("cpu")


def rows() -> tuple[torch.Tensor, ...]:
    return (torch.randn(8, 32),)


def small(made: Callable[[], nn.Module] = lambda: nn.Linear(32, 32), **more: Any) -> Model:
    return Model("a layer", made, rows, optim.SGD, None, **more)


def test_every_kind_is_there() -> None:
    """What the issue asks for, and each optimizer of torch's whose step is elementwise."""
    text = " ".join(model.about for model in MODELS)
    for kind in ("GPT", "ResNet", "LSTM", "bag", "attention", "norms", "pools", "whole step", "O2"):
        assert kind in text
    heads: Any = next(model for model in MODELS if "GPT" in model.about).make()
    assert heads.config.width // heads.config.heads == 128
    kinds = {type(m.optimizer([nn.Parameter(torch.zeros(2))])) for m in MODELS}
    takes_more = {optim.LBFGS, optim.SparseAdam, optim.Muon, optim.Adafactor, optim.Optimizer}
    assert kinds == {k for k in vars(optim).values() if isinstance(k, type)} - takes_more


@pytest.mark.slow_rows("compiles by Inductor", but=0)
@pytest.mark.sampled(7)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.about)
def test_a_model_trains_as_in_fp32(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operator by operator: what isn't so is the model's fault, or the check's."""
    real = run.mpcompile
    monkeypatch.setattr(run, "mpcompile", lambda what, **more: real(what, emit="aot_eager", **more))
    plain = run.MPOptimizer
    monkeypatch.setattr(run, "MPOptimizer", lambda inner: plain(inner, emit="eager"))
    result = tried(model, CPU)
    assert result.faults == ("nothing was verified",)


@pytest.mark.slow("compiles by Inductor")
@pytest.mark.parametrize("about", ["an embedding bag in FP16", "Adagrad's step"])
def test_what_is_compiled_is_verified(about: str, tmp_path: Path) -> None:
    (model,) = [model for model in MODELS if model.about == about]
    with run.fresh_cache(dir=str(tmp_path)):
        result = tried(model, CPU)
    assert result.faults == ()
    assert result.values >= 15


def test_what_raises_is_a_fault() -> None:
    def broken() -> nn.Module:
        raise ValueError("no such kernel\nmore")

    result = tried(small(broken), CPU)
    assert result.faults == ("it raises ValueError: no such kernel", "nothing was verified")


def test_a_loss_that_is_another_one_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    real = run._losses

    def off(model: Model, device: torch.device, plain: bool = False) -> Sequence[float]:
        return [loss * (1.0 if plain else 1.1) for loss in real(model, device, plain=True)]

    monkeypatch.setattr(run, "_losses", off)
    first, _ = tried(small(), CPU).faults
    assert first.startswith("its loss is ")


@pytest.mark.slow("compiles by Inductor")
def test_a_compiler_that_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = shutil.copy(SUPPORT / "wrong_cxx.sh", tmp_path / "sum")
    monkeypatch.setattr(run, "MODELS", [m for m in MODELS if m.about == "Adam's step"])
    with torch._inductor.config.patch({"cpp.cxx": (None, str(compiler))}):
        (result,) = run.check(CPU, tmp_path / "programs")
    (fault,) = result.faults
    assert fault.startswith("compiled wrongly: a graph at ")
    assert "; cured by " in fault
    assert "inductor" in next((tmp_path / "programs").glob("*.py")).read_text()


# -- the command -----------------------------------------------------------------------------------

RIGHT = Result("a model", 12, 0.5, (), ("forward: 1 constant",), 3.0)
WRONG = Result("another", 3, 1.0, ("compiled wrongly: a forward at add: off",), (), 2.0)


@pytest.mark.parametrize("wrong", [False, True])
def test_the_command(
    wrong: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [RIGHT, WRONG] if wrong else [RIGHT]
    monkeypatch.setattr(command, "check", lambda device, out: iter(results))
    assert cli.main(["check", "--device", "cpu"]) == wrong
    said = " ".join(capsys.readouterr().out.split())
    told = (
        "a model: verified 12 values, at most 0.5 of a rounding off, in 3 s (forward: 1 constant)"
    )
    assert said.startswith(told)
    assert ("compiled wrongly: a forward at add: off" in said) == wrong
    end = "15 values of 2 models were right; 1 model had a fault" if wrong else "had a fault"
    assert said.endswith(end)


def test_a_file_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert cli.main(["check", "--device", "cpu", "--out", str(file)]) == 2
    assert "name a folder" in capsys.readouterr().err
