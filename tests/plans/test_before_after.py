"""The README's picture shows the plan as it is today."""

from __future__ import annotations

import re

from repository import ROOT

from benchmarks.before_after import RIGHT, WIDTH, drawn, planned

PICTURE = ROOT / "docs" / "figures" / "before_after.svg"


def test_the_committed_picture_is_of_todays_plan() -> None:
    """Else: `python -m benchmarks.before_after`."""
    assert drawn(planned()) == PICTURE.read_text()


def test_no_text_leaves_the_picture() -> None:
    """A letter of a sans-serif face is on average at most 0.55 of its size wide."""
    texts = re.findall(r'<text x="([\d.]+)".*?font-size="(\d+)">(.*?)</text>', PICTURE.read_text())
    assert len(texts) > 15
    for x, size, text in texts:
        end = float(x) + 0.55 * int(size) * len(text)
        assert end < (RIGHT if float(x) < RIGHT else WIDTH), text
