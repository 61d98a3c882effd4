"""A plan as one HTML file, which a browser shows without a network.

`page.html` is the template; `page.css` and the scripts are copied into it (`file.py`). The plan
itself goes in as JSON (`data.py`), from which the scripts make everything that can be clicked; the
summary on top is plain HTML (`summary.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .data import data_of
from .file import HERE, rendered, write_page
from .summary import charts_of, notes_of, tiles_of

if TYPE_CHECKING:
    from ..plan import Plan

__all__ = ["render", "write"]

_SCRIPTS = ("elements.js", "nodes.js", "tree.js", "rows.js", "panel.js", "main.js")


def write(plan: Plan, path: str | Path) -> None:
    """Write the page of a plan.

    Raises:
        MPCompileError: the file can't be written.
    """
    write_page(render(plan), path, "plan")


def render(plan: Plan) -> str:
    """The page of a plan; the same text for the same plan."""
    return rendered(
        HERE / "page.html",
        styles=[HERE / "page.css"],
        scripts=[HERE / name for name in _SCRIPTS],
        plan=plan,
        data=data_of(plan),
        tiles=tiles_of(plan),
        charts=charts_of(plan),
        notes=notes_of(plan),
    )
