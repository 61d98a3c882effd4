"""Functions called in fresh processes, which have imported, compiled and cached nothing yet."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
"""Of the repository."""


def call_elsewhere(
    function: str, *arguments: Any, environment: Mapping[str, str] | None = None
) -> Any:
    """What a function returns in a fresh process.

    Args:
        function: as "benchmarks.verified:first_step"; it returns JSON data.
        arguments: JSON data.
        environment: variables beside those of this process.

    Raises:
        RuntimeError: it failed; its last words follow.
    """
    (found,) = calls_elsewhere(function, [arguments], environment)
    return found


def calls_elsewhere(
    function: str, calls: Sequence[Sequence[Any]], environment: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """The same for several calls in one fresh process: each result as soon as it is there."""
    command = [sys.executable, "-m", "benchmarks.harness.processes", function, json.dumps(calls)]
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
        if process.returncode:
            said.seek(0)
            last = said.read()[-2000:]
            raise RuntimeError(f"{function}: its process ended with {process.returncode}:\n{last}")


def starts(number: int, function: str, *arguments: Any) -> list[Any]:
    """What a function returns in a fresh process with empty caches of Inductor's, and in others
    with those that the first one has left.
    """
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder}
        return [call_elsewhere(function, *arguments, environment=caches) for _ in range(number)]


if __name__ == "__main__":
    _, name, calls = sys.argv
    # What is printed on the way is no result.
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)
        module, _, attribute = name.partition(":")
        call = getattr(importlib.import_module(module), attribute)
        for arguments in json.loads(calls):
            print(json.dumps(call(*arguments)), file=results, flush=True)
