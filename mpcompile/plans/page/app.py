"""The file of a page: its template, style, scripts and data in one text."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ...errors import MPCompileError

_HERE = Path(__file__).parent
_SCRIPTS = (
    "elements.js", "nodes.js", "tree.js", "rows.js", "tables.js", "panel.js", "main.js"
)  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """One number, what it is, and what to know about it."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Part:
    """One part of a bar: `precision` gives its colour; `amount` is its length, `shown` as text."""

    label: str
    precision: str
    amount: float
    shown: str


@dataclass(frozen=True)
class Chart:
    """Stacked bars: a title, what they are together, label -> the parts of each bar, and a note."""

    title: str
    total: str
    bars: dict[str, list[Part]]
    note: str = ""


@dataclass(frozen=True)
class Note:
    """Sentences under a title; `warns` if the user should look at them."""

    title: str
    lines: tuple[str, ...]
    warns: bool = False


@dataclass(frozen=True)
class Page:
    """What a page shows.

    Attributes:
        model, about: its title.
        facts: what stands beside the title: "level" -> "O1".
        views: the tabs of the list of nodes, by the names that `rows.js` and `tables.js` have.
        data: what the scripts read; `of_plan.data_of` says what is in it.
        verdict: sentences on top, the most important first.
        tiles, charts, notes: the summary below it; no note without lines is shown.
        numbers: what stands on the page of a report alone: "faults", "finite" and "drawings".
    """

    model: str
    about: str
    facts: dict[str, str]
    views: dict[str, str]
    data: dict[str, Any]
    notes: list[Note]
    verdict: tuple[str, ...] = ()
    tiles: tuple[Tile, ...] = ()
    charts: tuple[Chart, ...] = ()
    numbers: dict[str, Any] | None = None


def html(page: Page) -> str:
    """The file of a page; the same text for the same page.

    Its content security policy allows no request, and no style or script but its own, so that a
    name in the user's program can't become part of the page.
    """
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    style, script = _joined("page.css"), _joined(*_SCRIPTS)
    hashes = {"style_hash": _hash(style), "script_hash": _hash(script)}
    template = environment.get_template("page.html")
    return template.render(page=page, style=style, script=script, **hashes)


def write(text: str, path: str | Path, what: str) -> None:
    """Write a page.

    Raises:
        MPCompileError: the file can't be written; `what` says of what the page is.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise MPCompileError(
            f"the page of the {what} can't be written to {str(path)!r}: {error.strerror}; give the "
            "path of a file in a directory that you may write to"
        ) from error


def _joined(*names: str) -> str:
    return "\n".join((_HERE / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    """As a content security policy names an inline style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
