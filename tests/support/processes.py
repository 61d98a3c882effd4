"""A Python of its own, for what is seen from outside or must be the first in its process."""

import os
import subprocess
import sys
from pathlib import Path

from repository import ROOT


def python(
    *arguments: str, cwd: Path = ROOT, **variables: str | None
) -> subprocess.CompletedProcess[str]:
    """It finds us from any folder, has these variables besides its own (None: that one not), and
    must end well.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False,
        env={name: value for name, value in environment.items() if value is not None},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done
