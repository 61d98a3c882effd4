"""An option is declared once: what is derived from the declarations, and what repeats them."""

import dataclasses
import inspect
import pydoc
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python
from torch import nn

from mpcompile import LossScale, MPCompileError, MPOptimizer, cli, explain, mpcompile, plan_for
from mpcompile.rules.policy import Level, Policy
from mpcompile.runtime.records import compiled_plans
from mpcompile.settings import OPTIONS, Option, Options, Settings
from mpcompile.verify.verdicts import Verify

PLANNED = {name: option for name, option in OPTIONS.items() if option.plans}


def keywords(function: Callable[..., Any], *others: str) -> dict[str, Any]:
    """Keyword-only parameters and their defaults, in order, without the `others`."""
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in found if p.kind is p.KEYWORD_ONLY and p.name not in others}


def defaults(options: Mapping[str, Option]) -> dict[str, Any]:
    return {name: option.default for name, option in options.items()}


def test_the_signatures_repeat_the_declarations() -> None:
    """Names, order and defaults."""
    ours = keywords(mpcompile), keywords(explain, "device", "mp_optimizer")
    assert list(map(list, ours)) == [list(OPTIONS), list(PLANNED)]
    # `explain` asks the compiled model first: None is "not given".
    assert ours == (defaults(OPTIONS), dict.fromkeys(PLANNED))


def test_type_checkers_see_the_same_options() -> None:
    seen = Options.__annotations__
    handed_on = seen.keys() - OPTIONS.keys()
    assert handed_on == {"dynamic", "fullgraph", "disable"}
    assert handed_on <= inspect.signature(torch.compile).parameters.keys()
    written = inspect.signature(mpcompile).parameters
    # Both are text: the modules import annotations from the future.
    assert {name: seen[name].__forward_arg__ for name in OPTIONS} == {
        name: written[name].annotation for name in OPTIONS
    }


def test_help_and_dir_show_what_is_for_users() -> None:
    package = sys.modules["mpcompile"]
    assert sorted(dir(package)) == sorted(package.__all__)
    assert "Ellipsis" not in pydoc.render_doc(package)
    assert "max_grad_norm" in str(inspect.signature(MPOptimizer))
    for function in (explain, plan_for):
        assert inspect.signature(function).parameters["device"].default is None


def test_every_field_is_an_option_or_no_request() -> None:
    fields = {f.name for f in dataclasses.fields(Settings)}
    assert fields - OPTIONS.keys() == {"names", "scale_any_dtype"}


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
        regional=False,
        disable_passes=(),
        repair=False,
        strict=False,
        verify=Verify(),
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
    assert f"{', '.join(PLANNED)}: as for `mpcompile()`" in str(explain.__doc__)
    for function in (mpcompile, explain):
        assert "{" not in str(function.__doc__)


def test_the_command_line_has_the_options_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, option in PLANNED.items():
        assert f"--{name.replace('_', '-')} " in shown
        assert option.help.split(";")[0][:30] in shown


ADDED = """
import mpcompile as mp, torch
from mpcompile import MPCompileError, cli
from mpcompile.settings import Settings
assert Settings.parse({}).greeting == "hello"
assert Settings.parse({"greeting": "goodbye"}).greeting == "goodbye"
for call, inputs in ((mp.mpcompile, ()), (mp.explain, (torch.ones(2, 2),))):
    try:
        call(torch.nn.Linear(2, 2), *inputs, greeting="hullo")
    except MPCompileError as error:
        assert "greeting='hullo': use one of hello, goodbye; did you mean 'hello'" in str(error)
    else:
        raise AssertionError("not checked")
assert "greeting: what is said first." in mp.mpcompile.__doc__
assert "greeting, fuse_head" in mp.explain.__doc__
cli.main(["plan", "--help"])
"""


@pytest.mark.slow("compiles several models")
def test_adding_an_option_as_the_guide_says(tmp_path: Path) -> None:
    """In a copy of the sources: a field, its type, and a keyword in two signatures."""
    root = Path(mpcompile.__code__.co_filename).parent.parent
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root / "mpcompile", tmp_path / "mpcompile", symlinks=True, ignore=ignore)
    shutil.copytree(root / "passes", tmp_path / "passes", ignore=ignore)
    help_ = '"what is said first."'
    field = f'    greeting: str = _choice("hello", ("hello", "goodbye"), {help_}, plans=True)'
    for name, before, line in (
        ("settings.py", "    fuse_head: bool\n", "    greeting: str"),
        ("settings.py", "    fuse_head: bool = _switch(", field),
        ("api.py", "    fuse_head: bool = False,", '    greeting: str = "hello",'),
        ("preview/explain.py", "    fuse_head: bool | None = None,", "    greeting: Any = None,"),
    ):
        path = tmp_path / "mpcompile" / name
        text = path.read_text()
        assert text.count(before) == 1
        path.write_text(text.replace(before, f"{line}\n{before}"))
    said = python("-c", ADDED, cwd=tmp_path, PYTHONPATH=str(tmp_path)).stdout
    assert "--greeting {hello,goodbye}" in said


@pytest.mark.parametrize("apart", [False, True], ids=["mpcompile", "torch.compile"])
def test_bf16_is_scaled_by_a_loss_scale_of_the_users_alone(apart: bool) -> None:
    for given, scaled in ((8.0, False), ("grad_scaler", False), (LossScale.static(8.0), True)):
        net: Any = nn.Linear(4, 4)
        options: dict[str, Any] = {"dtype": "bf16", "emit": "eager", "loss_scale": given}
        how: Any = {"backend": "mpcompile", "options": options} if apart else options
        run: Any = torch.compile(net, **how) if apart else mpcompile(net, **how)
        run(torch.randn(2, 4)).sum().backward()
        assert [plan.scaled for plan in compiled_plans(run)] == [scaled]
        torch.testing.assert_close(net.bias.grad, torch.full((4,), 2.0))
