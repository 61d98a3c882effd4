"""The documents: their blocks of code, their prose and their anchors."""

import functools
import re
from pathlib import Path

from repository import ROOT

README = ROOT / "README.md"
DOCUMENTS = (
    README,
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "SUPPORT.md",
    *(ROOT / "docs").rglob("*.md"),
)
# In YAML, a command goes on in lines that are further in.
COMMAND = r"^(?: *- run: )?mpcompile ([a-z]+)\b([^#\n]*(?:\n {8,}--[^#\n]*)*)"
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)


def prose(document: Path) -> str:
    """The text without its fenced blocks."""
    return FENCED.sub("", document.read_text())


def fenced(document: Path) -> str:
    """The fenced blocks alone."""
    return "\n".join(FENCED.findall(document.read_text()))


def blocks(document: Path, language: str = "python") -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.M | re.S)


@functools.cache
def anchors(document: Path) -> frozenset[str]:
    """What GitHub makes of the headings: lower case, no punctuation, spaces as hyphens."""
    headings = re.findall(r"^#+ +(.+)$", prose(document), re.M)
    return frozenset(re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings)
