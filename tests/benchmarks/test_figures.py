"""The documents' figures: every word lies on the canvas, and none on another."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from benchmarks.harness.report import RESULTS
from benchmarks.peers.figure import draw

pytest.importorskip("matplotlib")


def test_words_of_the_peers_figure(tmp_path: Path) -> None:
    rows = json.loads((RESULTS / "peers_cpu.json").read_text())["rows"]
    figure = draw(tmp_path / "peers.svg", rows)
    figure.draw_without_rendering()
    words = [
        *(text for axes in figure.axes for text in (axes.title, *axes.get_xticklabels())),
        *(text for legend in figure.legends for text in legend.get_texts()),
    ]
    assert len(words) == 2 + 2 * len(rows) + 9
    boxes = [word.get_window_extent() for word in words]
    assert all(word.get_text().strip() for word in words)
    width, height = figure.bbox.size
    for word, box in zip(words, boxes, strict=True):
        assert 0 <= box.x0 < box.x1 <= width, word
        assert 0 <= box.y0 < box.y1 <= height, word
    for (a, one), (b, other) in itertools.combinations(zip(words, boxes, strict=True), 2):
        assert not one.overlaps(other), (a, b)
