"""The README's picture shows the plan as it is today."""

import itertools
import re

from repository import ROOT

from benchmarks.before_after import RIGHT, WIDTH, drawn, planned

PICTURE = ROOT / "docs" / "figures" / "before_after.svg"


def test_the_committed_picture_is_of_todays_plan() -> None:
    """Else: `python -m benchmarks.before_after`."""
    assert drawn(planned()) == PICTURE.read_text()


def test_no_text_leaves_the_picture_or_lies_on_another() -> None:
    """A letter of a sans-serif face is on average at most 0.55 of its size wide."""
    texts = re.findall(
        r'<text x="([\d.]+)" y="([\d.]+)".*?font-size="(\d+)">(.*?)</text>', PICTURE.read_text()
    )
    assert len(texts) > 15
    boxes = []
    for x, y, size, text in texts:
        end = float(x) + 0.55 * int(size) * len(text)
        assert end < (RIGHT if float(x) < RIGHT else WIDTH), text
        boxes.append((float(x), end, float(y) - int(size), float(y), text))
    for one, other in itertools.combinations(boxes, 2):
        apart = one[1] <= other[0] or other[1] <= one[0] or one[3] <= other[2] or other[3] <= one[2]
        assert apart, (one, other)


def test_the_reason_of_an_operator_is_the_one_that_decided() -> None:
    """Not why its group may be low, where the planner chose FP32."""
    (gelu,) = (node for node in planned() if node.name == "gelu")
    assert gelu.precision == "FULL"
    assert gelu.reason.endswith("nothing stores it: FP32 is free in its kernel")
    assert "nothing stores it: FP32 is free in its kernel" in PICTURE.read_text()
