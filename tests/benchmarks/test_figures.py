"""The documents' figures: every word lies on the canvas and none on another, and the committed
ones say what is drawn today.
"""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from documents import README

from benchmarks.figures import DRAWN, FIGURES, TELLING
from benchmarks.harness.report import RESULTS
from benchmarks.harness.ways import AUTOCAST, PIECES, WHOLE
from benchmarks.peers import geometric_mean

pytest.importorskip("matplotlib")

from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox


def committed(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def drawn(name: str, folder: Path) -> Figure:
    """A figure, of the committed results."""
    draw, report = DRAWN[name]
    return draw(folder / f"{name}.svg", committed(report))


def names(figure: str) -> set[str]:
    """What the committed results call what a figure shows."""
    if figure == "ablations":
        return {*committed("ablations_cpu")["master weights"]}
    if figure == "gradients":
        return {*committed("papers_cpu")["histograms"]}
    rows = committed(f"{figure}_cpu")["rows"]
    ways = {way for row in rows.values() for way in row.get("runs", ())}
    return {*rows, *ways} - {*TELLING}


def words(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Bbox]]:
    """Each text that is drawn, and where."""
    found: list[tuple[str, Bbox]] = []
    draw = Text.draw

    def recorded(self: Text, renderer: RendererBase) -> None:
        if self.get_visible() and self.get_text().strip():
            found.append((self.get_text(), self.get_window_extent(renderer)))
        draw(self, renderer)

    with monkeypatch.context() as patch:
        patch.setattr(Text, "draw", recorded)
        FigureCanvasAgg(figure).draw()
    return found


@pytest.mark.slow_rows("a benchmark's own test, which runs it small")
@pytest.mark.parametrize("name", DRAWN)
def test_words(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn(name, tmp_path)
    found = words(figure, monkeypatch)
    assert names(name) <= {word.replace("\n", " ") for word, _ in found}
    width, height = figure.bbox.size
    for word, box in found:
        assert 0 <= box.x0 < box.x1 <= width, word
        assert 0 <= box.y0 < box.y1 <= height, word
    for (word, one), (another, other) in itertools.combinations(found, 2):
        assert not one.overlaps(other), (word, another)


@pytest.mark.slow_rows("a benchmark's own test, which runs it small")
@pytest.mark.parametrize("name", DRAWN)
def test_the_committed_figure_says_the_same(name: str, tmp_path: Path) -> None:
    """Else draw it again: `python -m benchmarks.figures`.

    Letters are outlines in these files; a comment beside them has each word.
    """
    drawn(name, tmp_path)
    said = [
        re.findall(r"<!-- (.*?) -->", (folder / f"{name}.svg").read_text())
        for folder in (FIGURES, tmp_path)
    ]
    assert said[0] == said[1]


def test_every_figure_is_tested() -> None:
    assert {path.stem for path in FIGURES.glob("*.svg")} == {*DRAWN}


def test_the_readme_says_what_its_chart_shows() -> None:
    """Each ratio in the text of the picture, and under it which are below 1; and the means."""
    front = README.read_text().partition("```diff")[0]
    shown, said = front.partition("](docs/figures/real_models.svg)")[::2]
    report = committed("real_models_cpu")
    for name, ratios in report["ratios"].items():
        o1, o2 = (ratios[f"{way} over {AUTOCAST}"]["paired"] for way in PIECES)
        model = re.findall(r"[\w-]+", name)[0]
        assert f"{model} {o1:.2f}x and {o2:.2f}x" in shown
        assert (model in said.partition("are slower")[0]) == (o1 < 1)
    for way in (*PIECES, WHOLE[1]):
        pairs = [(row["seconds"][AUTOCAST], row["seconds"][way]) for row in report["rows"].values()]
        assert f"{geometric_mean(pairs)[0]:.2f}x" in (said if way in WHOLE else shown)
