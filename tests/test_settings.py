"""An option is declared once: what is derived from the declarations, and what repeats them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mpcompile import LossScale, MPCompileError, cli, mpcompile, plan_for
from mpcompile.rules.policy import Level, Policy
from mpcompile.settings import OPTIONS, Option, Settings

PLANNED = {name: option for name, option in OPTIONS.items() if option.plans}


def keywords(function: Callable[..., Any], *others: str) -> dict[str, Any]:
    """Keyword-only parameters and their defaults, in order, without the `others`."""
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in found if p.kind is p.KEYWORD_ONLY and p.name not in others}


def defaults(options: Mapping[str, Option]) -> dict[str, Any]:
    return {name: option.default for name, option in options.items()}


def test_the_signatures_repeat_the_declarations() -> None:
    """Names, order and defaults."""
    ours = keywords(mpcompile), keywords(plan_for, "device", "mp_optimizer")
    assert list(map(list, ours)) == [list(OPTIONS), list(PLANNED)]
    assert ours == (defaults(OPTIONS), defaults(PLANNED))


def test_every_field_is_an_option_or_no_request() -> None:
    fields = {f.name for f in dataclasses.fields(Settings)}
    assert fields - OPTIONS.keys() == {"scale_any_dtype"}


def test_a_request_without_keys_means_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPCOMPILE_DUMP", raising=False)
    assert Settings.parse({}) == Settings.parse(defaults(OPTIONS))
    assert Settings.parse({}) == Settings(
        dtype=None,
        level=Level.O1,
        policy=Policy(),
        loss_scale=None,
        pad="auto",
        emit="inductor",
        dump=None,
        fuse_head=False,
        recompute=False,
        disable_passes=(),
        strict=False,
        mode=None,
        options=None,
        scale_any_dtype=False,
    )


def test_what_is_written_arrives_parsed(tmp_path: Path) -> None:
    scale = LossScale.static(8.0)
    request = {
        "dtype": "float16", "level": "o2", "loss_scale": scale, "pad": "never", "emit": "eager",
        "dump": str(tmp_path / "new"), "fuse_head": True, "strict": True,
    }  # fmt: skip
    found = Settings.parse(request)
    assert (found.dtype, found.level, found.pad) == (torch.float16, Level.O2, "never")
    assert found.loss_scale is scale
    assert found.scale_any_dtype
    assert found.dump == tmp_path / "new"
    assert found.dump.is_dir()
    assert (found.emit, found.fuse_head, found.recompute, found.strict) == (
        "eager", True, False, True
    )  # fmt: skip


def test_the_words_of_an_option_are_accepted() -> None:
    for name, option in OPTIONS.items():
        for word in option.words:
            Settings.parse({name: [word] if isinstance(option.default, tuple) else word})
    with pytest.raises(MPCompileError, match="unknown option 'pads'; did you mean 'pad'"):
        Settings.parse({"pads": "never"})


def test_the_docstrings_hold_the_help() -> None:
    squeezed = " ".join(str(mpcompile.__doc__).split())
    for name, option in OPTIONS.items():
        assert f" {name}: {option.help}" in squeezed
    assert max(map(len, str(mpcompile.__doc__).splitlines())) <= 100
    assert f"{', '.join(PLANNED)}: as for `mpcompile()`" in str(plan_for.__doc__)
    for function in (mpcompile, plan_for):
        assert "{" not in str(function.__doc__)


def test_the_command_line_has_the_options_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, option in PLANNED.items():
        flag = f"--{name.replace('_', '-')} "
        assert (flag in shown) == (name != "policy")
        if name != "policy":
            assert option.help.split(";")[0][:30] in shown
