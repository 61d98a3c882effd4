"""One HTML file with its style, scripts and data inside, which a browser shows without a network.

The content security policy of such a file allows no request, and no style or script but its own, so
that a name in the user's program can't become part of the page. A template names them as
`style_hash` and `script_hash`, and has them as `style` and `script`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ...errors import MPCompileError

__all__ = ["HERE", "rendered", "write_page"]

HERE = Path(__file__).parent


def rendered(
    template: Path, *, styles: Sequence[Path], scripts: Sequence[Path], **values: Any
) -> str:
    """A page.

    Args:
        template: its HTML; it may include others from its folder and this one (`head.html`).
        styles, scripts: the files whose text becomes its one style and its one script.
        **values: what the template reads.
    """
    environment = Environment(
        loader=FileSystemLoader([template.parent, HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    style, script = _joined(styles), _joined(scripts)
    return environment.get_template(template.name).render(
        **values,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def write_page(text: str, path: str | Path, what: str) -> None:
    """Write a page.

    Raises:
        MPCompileError: the file can't be written; `what` says of what the page is.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise MPCompileError(
            f"the page of the {what} can't be written to {str(path)!r}: {error.strerror}; give the "
            "path of a file in a directory that exists and that you may write to"
        ) from error


def _joined(paths: Sequence[Path]) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def _hash(text: str) -> str:
    """As a content security policy names an inline style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
