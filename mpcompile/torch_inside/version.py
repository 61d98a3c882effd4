"""Which torch mpcompile works with. The package imports this first, before anything needs torch."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

from ..errors import MPCompileError, warn

OLDEST = (2, 12)
NEWEST = (2, 14)  # that mpcompile was tested with; a newer one is warned of
RANGE = f">={OLDEST[0]}.{OLDEST[1]}"


def check_torch_version(version: str) -> None:
    """Raise `MPCompileError` for a torch below `OLDEST`."""
    if release(version) < OLDEST:
        raise MPCompileError(
            f"mpcompile supports torch{RANGE}; this is torch {version}: install a supported torch"
        )


def is_untested(version: str) -> bool:
    """Whether a torch is newer than `NEWEST`."""
    return release(version) > NEWEST


@functools.lru_cache(maxsize=1)
def warn_if_untested(version: str) -> None:
    """Warn of a torch that is newer than `NEWEST`: once, before the first compile."""
    if is_untested(version):
        newest = ".".join(map(str, NEWEST))
        warn(
            f"mpcompile: torch {version} is newer than {newest}, the newest that mpcompile was "
            "tested with. What is compiled is verified at its first call; `mpcompile check` says "
            "what is missing"
        )


def warn_of_version(version: str) -> None:
    """Warn of a torch that is not supported."""
    try:
        check_torch_version(version)
    except MPCompileError as error:
        # Compiling is refused later. What fails before that, on import, is explained by this.
        warn(f"mpcompile: {error}")


def release(version: str) -> tuple[int, int]:
    """`(2, 13)` of `"2.13.0+cpu"`."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _installed() -> str | None:
    """The version of torch, which isn't imported for it; None where only an import tells."""
    if torch := sys.modules.get("torch"):
        return str(torch.__version__)
    if importlib.util.find_spec("torch") is None:
        text = (
            f"mpcompile needs torch, which is not installed for {sys.executable}: "
            f"pip install 'torch{RANGE}', or the build of it that fits your device"
        )
        # The command's script imports the package before it can call anything that would catch.
        if Path(*sys.argv[:1]).stem == "mpcompile":
            print(f"mpcompile: {text}", file=sys.stderr)
            sys.exit(2)
        raise ModuleNotFoundError(text, name="torch")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("torch")
    return None


if (_version := _installed()) is not None:
    warn_of_version(_version)
