"""Aligned columns: as plain text that is never cut or wrapped, and as a rich table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.table import Table
from rich.text import Text

# A node's colour follows its precision; what a pass has added steps back.
STYLES = {"LOW": "green", "FULL": "yellow", "KEEP": "blue"}
ADDED = "dim"


@dataclass
class Grid:
    """Rows of cells under their heads.

    Attributes:
        heads: the title of each column; empty for rows without titles.
        rows: the cells, as many in each row.
        styles: a rich style for each row, or empty: none.
        indent: spaces before each line of the text.
    """

    heads: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)
    indent: int = 0

    def add(self, *cells: str, style: str = "") -> None:
        self.rows.append(cells)
        self.styles.append(style)

    def __str__(self) -> str:
        # A rich table of 3000 rows takes more than a second to render; this takes a hundredth.
        rows = [self.heads, *self.rows] if self.heads else self.rows
        widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
        space = " " * self.indent
        return "\n".join(space + _aligned(row, widths) for row in rows)

    def __rich__(self) -> Table:
        table = Table(box=None, pad_edge=False, show_header=bool(self.heads))
        for head in self.heads or ("",) * len(self.rows[0] if self.rows else ()):
            table.add_column(head, overflow="fold")
        for row, style in zip(self.rows, self.styles, strict=True):
            table.add_row(*map(Text, row), style=style)
        return table


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (set_cell_size(cell, width) for cell, width in zip(row, widths, strict=True))
    return "  ".join(cells).rstrip()


Part = str | Text | Grid


def as_text(parts: Iterable[Part]) -> str:
    """The parts one below the other, without colours, at any width that it takes."""
    return "\n".join(map(str, parts))


class Shown:
    """What shows itself part by part: to `print` and, in colours, to `rich.print`."""

    def _parts(self) -> Iterable[Part]:
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(self._parts())

    def __rich__(self) -> Group:
        """For `rich.print`: coloured, and folded to the width of the terminal."""
        return Group(*(Text(part) if isinstance(part, str) else part for part in self._parts()))
