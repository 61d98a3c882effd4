"""A plan as one HTML file, which a browser shows without a network.

`page.html` is the template; `page.css` and the scripts are copied into it. The plan itself goes in
as JSON (`data.py`), from which the scripts make everything that can be clicked; the summary on top
is plain HTML (`summary.py`). The content security policy of the file allows no request, and no
style or script but its own, so that a name in the user's program can't become part of the page.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ...errors import MPCompileError
from .data import data_of
from .summary import charts_of, notes_of, tiles_of

if TYPE_CHECKING:
    from ..plan import Plan

__all__ = ["render", "write"]

_HERE = Path(__file__).parent
_SCRIPTS = ("nodes.js", "tree.js", "rows.js", "panel.js", "main.js")


def write(plan: Plan, path: str | Path) -> None:
    """Write the page of a plan.

    Raises:
        MPCompileError: the file can't be written.
    """
    try:
        Path(path).write_text(render(plan), encoding="utf-8")
    except OSError as error:
        raise MPCompileError(
            f"the page of the plan can't be written to {str(path)!r}: {error.strerror}; give the "
            "path of a file in a directory that exists and that you may write to"
        ) from error


def render(plan: Plan) -> str:
    """The page of a plan; the same text for the same plan."""
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    style = _source("page.css")
    script = "\n".join(map(_source, _SCRIPTS))
    return environment.get_template("page.html").render(
        plan=plan,
        data=data_of(plan),
        tiles=tiles_of(plan),
        charts=charts_of(plan),
        notes=notes_of(plan),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def _source(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a content security policy names an inline style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
