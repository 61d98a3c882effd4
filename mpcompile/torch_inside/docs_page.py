"""All names as a page: `python -m mpcompile.torch_inside.docs_page > docs/torch_inside.md`."""

from __future__ import annotations

import textwrap

from .private_names import NAMES, Name, Part, take_all

_TITLE = "# What mpcompile takes from inside torch"
_ABOUT = (
    "torch promises nothing about these names. Where a release lacks one, what needs it is off "
    "([a newer torch](troubleshooting.md#a-newer-torch)). `make test-inside` tries them on another "
    "torch. This page is the table in `mpcompile/torch_inside/`; "
    "`python -m mpcompile.torch_inside.docs_page` prints it."
)


def page() -> str:
    """The names as Markdown: a section for each part of mpcompile that can't do without them."""
    take_all()
    parts = [_TITLE, "", _filled(_ABOUT, ""), ""]
    for part in Part:
        names = sorted((n for n in NAMES.values() if n.part is part), key=lambda n: n.path)
        parts += [f"\n## Without these, {part.value}\n", *map(_line, names)]
    return "\n".join(parts) + "\n"


def _line(name: Name) -> str:
    spelt = " or ".join(f"`{path.replace(':', '.')}`" for path in (name.path, *name.others))
    return _filled(f"* {spelt}: {name.why}", "  ")


def _filled(text: str, indent: str) -> str:
    return textwrap.fill(
        text, 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    print(page(), end="")
