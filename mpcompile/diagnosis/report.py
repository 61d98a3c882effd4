"""What `diagnose` found: its data, and what shows and stores it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group

from ..plans import stored
from ..plans.grid import as_rich, as_text
from ..plans.page import app
from . import report_page, report_text
from .report_data import NodeNumbers, ReportData, Update

__all__ = ["NodeNumbers", "Report", "Update"]


class Report(ReportData):
    """What `diagnose` found: `ReportData` that prints itself."""

    def save(self, path: str | Path) -> None:
        """Write `to_dict()` as JSON.

        Raises:
            MPCompileError: the file can't be written.
        """
        stored.write(self.to_dict(), path)

    def to_html(self, path: str | Path) -> None:
        """Write the report as one HTML file to read in a browser; it needs no network.

        Raises:
            MPCompileError: the file can't be written.
        """
        app.write(report_page.render(self), path, "report")

    def __str__(self) -> str:
        return as_text(report_text.parts(self))

    def __rich__(self) -> Group:
        return as_rich(report_text.parts(self))
