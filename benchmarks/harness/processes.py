"""A measurement in a fresh process, which has imported, compiled and cached nothing yet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "json_from_process"]

ROOT = Path(__file__).resolve().parent.parent.parent
"""Of the repository."""


def json_from_process(*arguments: str, environment: dict[str, str]) -> Any:
    """Run `python ARGUMENTS` from the root of the repository; return what its last line says.

    Args:
        environment: variables beside those of this process.

    Returns:
        The last line of its output, read as JSON.

    Raises:
        RuntimeError: it failed; its last words follow.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        what = f"`python {' '.join(arguments)}` ended with {done.returncode}"
        raise RuntimeError(f"{what}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
