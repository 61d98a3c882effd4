"""torchvision's models as their benchmark measures them, and its report."""

from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks.vision
from benchmarks.__main__ import main
from benchmarks.vision import make_report
from benchmarks.zoo.catalogue import TORCHVISION
from benchmarks.zoo.measure import ARMS, BOTH, COMPILED, floating, measure
from benchmarks.zoo.report import faults

# torch warns, while Dynamo traces other libraries, of what those do.
third_party = pytest.mark.filterwarnings("ignore")


@third_party
@pytest.mark.parametrize(
    "name", ["mvit", *(pytest.param(name, marks=pytest.mark.sweep("the zoo of torchvision"))
                       for name in ("swin", "retinanet", "faster_rcnn", "raft"))]
)  # fmt: skip
def test_a_model_of_torchvision(name: str) -> None:
    pytest.importorskip("torchvision")
    row = measure(f"torchvision/{name}", draws=2)
    assert faults(row) == []
    # The reference is right: FP32 is as near to it as FP32 can be.
    assert max(row["arms"][COMPILED]["error"]) < 1e-4
    assert len(row["arms"]["O1"]["error"]) == 2 + len(TORCHVISION[name].others)


def test_a_detector_is_called_with_lists() -> None:
    """A target for each image: three boxes within it, and what they hold."""
    entry = TORCHVISION["mask_rcnn"]
    inputs = entry.draw(torch.Generator().manual_seed(0))
    called: list[Any] = []

    class Detector(torch.nn.Module):
        def forward(self, *arguments: Any) -> dict[str, torch.Tensor]:
            called.extend(arguments)
            return {"class": torch.tensor(2.0), "box": torch.tensor(3.0)}

    assert entry.loss(Detector(), inputs).item() == 5.0
    images, targets = called
    assert [image.shape for image in images] == [(3, 64, 64)] * 2
    for number, target in enumerate(targets):
        assert torch.equal(target["boxes"], inputs["boxes"][number])
        left, top, right, bottom = target["boxes"].unbind(-1)
        assert bool(((left >= 0) & (left < right) & (right <= 64)).all())
        # A pixel belongs to a mask if its centre lies in the box.
        width = (right - 0.5).ceil() - (left - 0.5).ceil()
        height = (bottom - 0.5).ceil() - (top - 0.5).ceil()
        assert target["masks"].sum((1, 2)).tolist() == (width * height).tolist()


def test_sizes_change_from_step_to_step() -> None:
    entry = TORCHVISION["fcos"]
    images = [draw(torch.Generator().manual_seed(0))["images"] for draw in entry.others]
    assert [batch.shape[-1] for batch in images] == list(range(72, 145, 8))


def test_floating_reaches_into_lists() -> None:
    whole, number = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    low = floating(([whole], {"labels": number, "name": "x"}), torch.float16)
    assert low[0][0].dtype == torch.float16
    assert low[1]["labels"] is number
    assert low[1]["name"] == "x"


# -- the report ------------------------------------------------------------------------------------


def a_row(**arms: dict[str, Any]) -> dict[str, Any]:
    found = {
        arm: {"error": [error], "worst": [error], "graphs": 1, "resized": 3,
              "frames": ["f (a.py:1): x"], "left": [], "warned": []}
        for arm in ARMS
        for error in [0.0 if arm == COMPILED else 2.0]
    }  # fmt: skip
    return {"name": "torchvision/made_up", "kind": "video", "arms": {**found, **arms}}


def test_the_report_has_sizes_and_frames() -> None:
    failed = {BOTH: {"failed": "E: no"}}
    report = make_report([], [a_row(), a_row(**failed)])
    assert report.notes[0].startswith("**Not measured yet: faster_rcnn, ")
    sizes, frames = report.tables[-2:]
    assert list(sizes.rows) == [
        ("made_up", "3 / 3 / 3 / 3", "1 / 1 / 1 / 1", "1.00x", "1.00x"),
        ("made_up", "3 / - / 3 / 3", "1 / - / 1 / 1", "-", "-"),
    ]
    assert list(frames.rows) == [("f (a.py:1)", "x", "made_up, made_up")]
    assert report.verdicts["at least 16 architectures of torchvision: 2"] is False
    assert report.verdicts["O1's gradients no further off than compile + autocast's: 1 of 1"]


def test_every_model_is_of_a_known_kind() -> None:
    assert len(TORCHVISION) >= 16
    assert {entry.kind for entry in TORCHVISION.values()} == {
        "classification", "detection", "segmentation", "optical flow", "video",
    }  # fmt: skip


def test_without_torchvision_it_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmarks.vision, "NEEDS", ("no_such_package",))
    assert main(["run", "vision", "--out", str(tmp_path)]) == 0
    assert "vision: skipped, because no_such_package is not installed" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
