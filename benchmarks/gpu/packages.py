"""The packages that the pieces need: those that Python has, then those of a folder of wheels.

Nothing is installed and nothing is fetched. A wheel of pure Python is a zip file that can be
imported once it is unpacked; those of packages that Python lacks are unpacked into a folder, which
comes last on the path, so that nothing that is there is replaced.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import zipfile
from pathlib import Path

NEEDED = (
    "torch", "numpy", "jinja2", "networkx", "sympy", "platformdirs", "rich",
    "pytest", "pytest_timeout", "xdist", "hypothesis", "expecttest",
)  # fmt: skip
"""What is imported; the benchmark `papers` needs sklearn, too."""


class CannotUnpack(ValueError):
    """A wheel that is not pure Python; the message says which."""


def missing(folder: Path) -> list[str]:
    """The modules of `NEEDED` that can't be imported, not from `folder` either."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def unpack(wheels: Path, folder: Path) -> list[str]:
    """Unpack the wheels of packages that Python lacks into `folder`.

    Returns:
        Names of the packages.

    Raises:
        CannotUnpack: one of them is built for a kind of machine.
        FileNotFoundError: there is no wheel in `wheels`.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise FileNotFoundError(f"no wheels in {wheels}")
    unpacked = []
    for wheel in found:
        name = wheel.name.partition("-")[0]
        if _installed(name):
            continue
        if not wheel.name.endswith("-none-any.whl"):
            raise CannotUnpack(f"{wheel.name} is not pure Python: install it")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        unpacked.append(name)
    return unpacked


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
