"""Which torch mpcompile works with. The package imports this first, before anything needs torch."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import NoReturn

from .errors import MPCompileError, MPCompileWarning

__all__ = ["NEWEST", "OLDEST", "RANGE", "check_torch_version"]

OLDEST, NEWEST = (2, 11), (2, 14)
RANGE = f">={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1]}"


def check_torch_version(version: str) -> None:
    """Raise `MPCompileError` outside the supported range, `OLDEST` <= version < `NEWEST`."""
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else (0, 0)
    if not OLDEST <= found < NEWEST:
        raise MPCompileError(
            f"mpcompile supports torch{RANGE}; this is torch {version}: "
            "install a supported torch, or an mpcompile made for this one"
        )


def _refuse_without_torch() -> NoReturn:
    text = (
        f"mpcompile needs torch, which is not installed for {sys.executable}: "
        f"pip install 'torch{RANGE}', or the build of it that fits your device"
    )
    # The script of the command imports the package before it can call anything that would catch.
    if Path(*sys.argv[:1]).stem == "mpcompile":
        print(f"mpcompile: {text}", file=sys.stderr)
        sys.exit(2)
    raise ModuleNotFoundError(text, name="torch") from None


try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    _refuse_without_torch()

try:
    check_torch_version(torch.__version__)
except MPCompileError as error:
    # Compiling is refused later. What fails before that, for a name that torch moved, is explained.
    warnings.warn(f"mpcompile: {error}", MPCompileWarning, stacklevel=3)
