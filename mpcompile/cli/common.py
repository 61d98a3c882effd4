"""What several commands share: flags of options, devices, factories, and what is printed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from ..devices.registry import capabilities
from ..errors import MPCompileError
from ..preview.factory import CONTRACT
from ..rules.policy import parse_dtype
from ..settings import OPTIONS

LEVELS = ("O1", "O2", "O3")  # at O0 there is nothing to plan, and nothing to diagnose
_POLICY = {
    "metavar": "FILE",
    "help": "your overrides, by operator, module or node: a .toml or .json file",
}
DEFAULTS = (
    "Options that are left out are those of mpcompile(model), or those with which the factory has "
    "compiled its model"
)


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but no "(default: None)"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, ()):
            return action.help
        return super()._get_help_string(action)


def _dtype(word: str) -> str:
    """A word for a dtype: `float16`, and all others that `mpcompile(dtype=)` takes."""
    try:
        parse_dtype(word)
    except MPCompileError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return word


def number(text: str, fits: Callable[[float], bool], needed: str) -> float:
    """The number that a flag is given; the error for one that doesn't fit ends with `needed`."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not fits(found):
        raise argparse.ArgumentTypeError(f"{text}: {needed}")
    return found


def add_option(parser: argparse.ArgumentParser, name: str, **own: Any) -> None:
    """Add the flag of one of `mpcompile()`'s options; `own` replaces parts of its declaration. What
    is left out on the command line is no attribute of what it is parsed to.
    """
    option = OPTIONS[name]
    how: dict[str, Any] = {"help": option.help, "default": argparse.SUPPRESS}
    if name == "dtype":
        how |= {"type": _dtype, "metavar": "DTYPE"}
    elif isinstance(option.default, bool):
        how["action"] = "store_true"
    elif isinstance(option.default, tuple):
        how |= {"nargs": "+", "choices": option.words, "metavar": "NAME"}
    elif option.words:
        how["choices"] = option.words
    else:
        how |= _POLICY if name == "policy" else {"type": Path, "metavar": "DIR"}
    parser.add_argument(f"--{name.replace('_', '-')}", **{**how, **own})


def given(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of these options that the command line names or has a default for."""
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def takes_factory(parser: argparse.ArgumentParser, about: str) -> None:
    """Make a command one that takes a factory; `about` says what it does, in full sentences."""
    parser.description, parser.formatter_class = f"{about} {CONTRACT}.", Help
    parser.add_argument("factory", metavar="pkg.module:factory", help="makes the model")


def new_file(text: str) -> Path:
    """The path of a file that a command is to write, whose folder is made now: before the work."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory: name a file")
    return path


def known_device(name: str) -> torch.device | None:
    """Return the device asked for; None for ``"auto"``."""
    if name == "auto":
        return None
    try:
        device = torch.device(name)
    except RuntimeError:
        raise MPCompileError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N") from None
    if not (asked := capabilities(device)).is_there():
        raise MPCompileError(
            f"device {name!r} is not there: torch sees {asked.count()} {device.type.upper()} "
            f"devices; use --device cpu, or install a {device.type.upper()} build of torch"
        )
    return device


def show(console: Console, text: str) -> None:
    """Print text as it is, without wrapping it."""
    console.out(text, highlight=False)


def show_tables(console: Console, found: Any) -> None:
    """Print what has `__rich__`: coloured on a terminal, and as `print` would elsewhere."""
    if console.is_terminal:
        console.print(found)
    else:
        show(console, str(found))


def complain(text: str) -> None:
    """Print a message to stderr, on one line."""
    Console(stderr=True).print(Text.assemble(("mpcompile:", "red"), " ", text), soft_wrap=True)


def failed(conditions: Iterable[str]) -> int:
    """Print the conditions of `--fail-...` that hold, and return the exit status."""
    held = list(conditions)
    for condition in held:
        complain(condition)
    return 1 if held else 0
