"""The last check of this torch, from the user's cache, or a new one in a process of its own.

A check compiles about twenty programs. In a process of its own it can't touch what the caller's
has: random state, modes, what Dynamo has compiled, a GPU. Processes that start together, such as
ranks, wait for one of them to make it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import platformdirs

from .._torch import NEWEST, is_untested
from ..errors import MPCompileWarning
from .failures import Failure, Health
from .private_names import Part

__all__ = ["SKIP", "last", "last_or_new", "path", "read", "said", "write"]

SKIP = "MPCOMPILE_CHECK"
"""Environment variable: "0" makes no check and reads no result: nothing is known to be wrong."""

_SECONDS = 900  # a check takes one minute; on a machine that is busy, many
_CODE = "import sys; sys.path[:] = {path!r}; from mpcompile.cli import main; sys.exit(main({args}))"

# What changes how torch compiles, or says so, and has nothing to do with whether it works.
_DROPPED = ("TORCH_", "TORCHDYNAMO_", "PYTORCH_", "MPCOMPILE_")


def path() -> Path:
    """Where the result for these versions of torch, mpcompile and Python lies, if there is one."""
    it = Health()
    name = f"torch-{it.torch}-mpcompile-{it.mpcompile}-python-{it.python}.json"
    return platformdirs.user_cache_path("mpcompile") / "checks" / name


def last() -> Health | None:
    """The result of the last check with these versions; None: there is none."""
    return read(path())


def last_or_new() -> Health:
    """The result of the last check; on a torch newer than all that were tested, if there is none,
    of one made now. Warns of such a torch, and of what is off.
    """
    if os.environ.get(SKIP) == "0":
        return Health()
    if is_untested(Health.torch):
        with _one_at_a_time():
            health = last() or _new()
    else:
        health = last() or Health()
    if health.off() or is_untested(Health.torch):
        warnings.warn(f"mpcompile: {said(health)}", MPCompileWarning, stacklevel=2)
    return health


def said(health: Health) -> str:
    """What is wrong with this torch, in one sentence."""
    newest = ".".join(map(str, NEWEST))
    new = f" is newer than {newest}, the newest that mpcompile was tested with:"
    off = "; ".join(f"{part.value} ({why})" for part, why in health.off().items())
    found = off or "`mpcompile check` found nothing wrong"
    return f"torch {health.torch}{new if is_untested(health.torch) else ':'} {found}"


def read(file: Path) -> Health | None:
    """A result that `write` has written; None if it can't be read, or is of other versions."""
    try:
        found = Health.of(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    it = Health()
    mine = (it.torch, it.mpcompile, it.python)
    return found if (found.torch, found.mpcompile, found.python) == mine else None


def write(health: Health, file: Path) -> None:
    """Write a result as a whole or not at all.

    Raises:
        OSError: the file can't be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".check-") as folder:
        whole = Path(folder) / file.name
        whole.write_text(json.dumps(health.to_dict(), indent=1), encoding="utf-8")
        os.replace(whole, file)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Wait for other processes that make this check. Where no file can be locked, don't."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock = path().with_suffix(".lock")
            lock.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(lock.open("w")), fcntl.LOCK_EX)
        yield


def _new() -> Health:
    """Check this torch in a new process; what can't be checked is not compiled with."""
    if not Path(sys.executable or "").name.startswith("python") or hasattr(sys, "frozen"):
        return _unchecked(f"sys.executable is {sys.executable!r}, which is no Python")
    with tempfile.TemporaryDirectory(prefix="mpcompile-check-") as folder:
        file = Path(folder) / "check.json"
        code = _CODE.format(path=sys.path, args=["check", "--out", str(file)])
        try:
            done = subprocess.run(
                [sys.executable, "-c", code], env=_environment(os.environ), timeout=_SECONDS,
                stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            return _unchecked(f"{type(error).__name__}: {error}")
        health = read(file)
    if health is None:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return _unchecked(f"exit status {done.returncode}: {lines[-1]}")
    with contextlib.suppress(OSError):  # then each process makes its own
        write(health, path())
    return health


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    kept = {key: value for key, value in variables.items() if not key.startswith(_DROPPED)}
    return {**kept, "CUDA_VISIBLE_DEVICES": ""}  # the programs are for a CPU


def _unchecked(why: str) -> Health:
    reason = f"it could not be made: {why}; run it by hand, or set {SKIP}=0 to do without"
    return Health((Failure("`mpcompile check`", Part.COMPILE, reason),))
