"""The zoo: some of its models as its benchmarks measure them, and how rows are judged and kept."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.zoo import DRAWS, faults, further_off, make_report, ratio_to, timm_models
from benchmarks.zoo.catalogue import LIBRARIES, measure_each
from benchmarks.zoo.measure import AUTOCAST, COMPILED, FLOOR, HALF, LEVELS, _dead, floating, measure

# torch warns, while Dynamo traces other libraries, of what those do.
third_party = pytest.mark.filterwarnings("ignore")

# Models whose gradients aren't further off in some draw by a margin, or round just as their peers'.
SAMPLE = (
    "transformers/bert", "timm/resnet10t", "timm/swin", "transformers/t5",
    *(pytest.param(name, marks=pytest.mark.sweep("the zoo"))
      for name in ("transformers/gpt_neox", "transformers/olmoe", "transformers/mamba",
                   "timm/convnext", "timm/mixer", "timm/tnt")),
)  # fmt: skip


@pytest.mark.slow("a benchmark's own test, which runs it small")
@third_party
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_of_the_zoo(name: str) -> None:
    if importlib.util.find_spec(name.partition("/")[0]) is None:
        pytest.skip("not installed")
    row = measure(name, draws=DRAWS)
    assert faults(row) == []
    # The reference is right: FP32 is as near to it as FP32 can be.
    assert max(row["arms"][COMPILED]["error"]) < 1e-4


def test_the_zoo_is_large_enough() -> None:
    assert len(LIBRARIES["transformers"]) >= 30
    assert len(LIBRARIES["timm"]) >= 25
    assert {entry.kind for entry in LIBRARIES["transformers"].values()} == {
        "encoder", "decoder", "encoder-decoder", "vision", "audio", "mixture of experts",
        "state space",
    }  # fmt: skip


# -- judging ---------------------------------------------------------------------------------------


def arm(*errors: float, **more: Any) -> dict[str, Any]:
    found = {"error": list(errors), "worst": list(errors), "graphs": 1, "frames": [], "left": [],
             "warned": []}  # fmt: skip
    return {**found, **more}


def a_row(**arms: dict[str, Any]) -> dict[str, Any]:
    sound = {COMPILED: arm(0.0, 0.0), AUTOCAST: arm(2.0, 4.0),
             HALF: arm(3.0, 3.0), "O1": arm(1.0, 6.0), "O2": arm(2.5, 4.0)}  # fmt: skip
    return {"name": "timm/made_up", "kind": "mixer", "arms": {**sound, **arms}}


def test_further_off_means_in_each_draw() -> None:
    assert further_off(a_row(O1=arm(2.1, 4.1)), "O1", AUTOCAST)
    assert not further_off(a_row(O1=arm(2.1, 4.0)), "O1", AUTOCAST)
    assert faults(a_row()) == []
    # Roundings to FP32 explain up to twice FP32's error.
    full = {COMPILED: arm(0.06, 0.04)}
    assert not further_off(a_row(O1=arm(2.1, 4.1), **full), "O1", AUTOCAST)
    assert further_off(a_row(O1=arm(2.13, 4.1), **full), "O1", AUTOCAST)
    # Half as far off in one draw, half as far again in the other.
    assert ratio_to(a_row(), "O1", AUTOCAST, "error") == 1.0


@pytest.mark.parametrize(
    ("arms", "fault"),
    [
        ({"O1": arm(2.1, 4.1, worst=[1.0, 1.0])}, "O1: gradients further off than autocast's"),
        ({"O2": arm(1.0, 1.0, worst=[3.1, 3.1])},
         "O2: the worst parameter's gradients further off than pure half's"),
        ({"O1": arm(1.0, 1.0, graphs=2)}, "O1 makes 2 graphs, torch.compile 1"),
        ({"O2": arm(1.0, 1.0, frames=["forward (net.py:7): why"])},
         "O2 leaves forward (net.py:7) to Python, torch.compile doesn't"),
        ({"O2": arm(1.0, 1.0, left=["a reason"])}, "O2 leaves a graph in FP32: a reason"),
        ({"O2": arm(1.0, 1.0, warned=["a word"])}, "O2 warns: a word"),
        ({"O2": arm(1.0, 1.0, dead=["head.weight"])}, "O2: the gradient of head.weight is zero"),
        ({"O1": {"failed": "KeyError: 1"}}, "O1 fails: KeyError: 1"),
    ],
)  # fmt: skip
def test_each_fault_is_named(arms: dict[str, Any], fault: str) -> None:
    assert faults(a_row(**arms)) == [fault]


def test_a_dead_parameter_is_named() -> None:
    """Not where exact arithmetic may make its gradient zero."""
    exact = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4) * FLOOR / 4}
    found = {"a": torch.ones(4), "b": torch.zeros(4), "c": torch.zeros(4)}
    assert _dead(found, exact) == {"b"}
    assert _dead({**found, "b": torch.tensor([0.0, 0, 0, 1e-9])}, exact) == set()


def test_floating_reaches_into_lists() -> None:
    number = torch.zeros(2, dtype=torch.int64)
    low = floating(([torch.zeros(2)], {"labels": number, "name": "x"}), torch.float16)
    assert low[0][0].dtype == torch.float16
    assert low[1] == {"labels": number, "name": "x"}


def test_frames_that_torch_compile_leaves_are_no_fault() -> None:
    """Whatever the reason that either gives."""
    ours, plain = arm(1.0, 1.0, frames=["f (a.py:1): x"]), arm(0.0, 0.0, frames=["f (a.py:1): y"])
    assert faults(a_row(**{COMPILED: plain, "O1": ours})) == []


def test_where_torch_compile_fails_nothing_is_ours() -> None:
    failed = {"failed": "E: no"}
    row = a_row(**{COMPILED: failed, "O1": failed})
    assert faults(row) == []
    report = make_report([], [row])
    assert ("timm/made_up", f"a peer's: {COMPILED} fails: E: no") in report.tables[-1].rows


def test_a_peer_that_fails_is_left_out() -> None:
    row = a_row(**{HALF: {"failed": "E: no kernel"}})
    assert faults(row) == []
    assert ratio_to(row, "O2", HALF, "error") is None
    assert "O2's gradients no further off than pure half's: 0 of 0" in verdicts(row)


def verdicts(*rows: dict[str, Any]) -> dict[str, bool]:
    return dict(make_report([], rows).verdicts)


def test_verdicts_count_rows() -> None:
    found = verdicts(a_row(), a_row(O1=arm(2.1, 4.1)), {"name": "timm/died", "died": "killed"})
    assert found == {
        "at least 30 architectures of transformers: 0": False,
        "at least 25 architectures of timm: 3": False,
        "models without a fault, of those that torch.compile trains: 1 of 3": False,
        "O1's gradients no further off than autocast's: 1 of 2": False,
        "O2's gradients no further off than pure half's: 2 of 2": True,
        "O2's gradients no further off than autocast's: 2 of 2": True,
    }


# -- the run ---------------------------------------------------------------------------------------


def worker(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of what measures, `made_up:measure`; it notes the names that it is asked for."""
    notes = folder / "notes"
    lines = [
        "import sys", "def measure(name, draws):",
        f"    print(name, file=open({str(notes)!r}, 'a'))", f"    {text}",
        "    return {'name': name}",
    ]  # fmt: skip
    (folder / "made_up.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return notes


MADE_UP = "made_up:measure"


def test_rows_are_kept_and_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = worker("pass", tmp_path, monkeypatch)
    names = ["timm/a", "timm/b"]

    def measured(number: int, draws: int, commit: str) -> list[dict[str, Any]]:
        kept = tmp_path / "scratch" / "rows.jsonl"
        return measure_each(names[:number], draws, kept=kept, commit=commit, function=MADE_UP)

    assert measured(1, 7, "abc") == [{"name": "timm/a"}]
    assert measured(2, 7, "abc") == [{"name": "timm/a"}, {"name": "timm/b"}]
    assert notes.read_text().split() == names
    # Another commit, other draws, or uncommitted changes: measured again.
    for draws, commit in ((7, "abd"), (3, "abc"), (7, "abd+changes"), (7, "abd+changes")):
        notes.unlink()
        measured(1, draws, commit)
        assert notes.read_text().split() == ["timm/a"]


def test_a_process_that_dies_takes_one_row_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = worker("name == 'timm/b' and sys.exit(3)", tmp_path, monkeypatch)
    rows = measure_each(["timm/a", "timm/b", "timm/c"], 1, function=MADE_UP)
    died = {"name": "timm/b", "died": "its process ended with 3"}
    assert rows == [{"name": "timm/a"}, died, {"name": "timm/c"}]
    assert notes.read_text().split() == ["timm/a", "timm/b", "timm/c"]
    assert faults(died) == ["the process died: its process ended with 3"]


def test_timm_leaves_no_stand_in_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other packages would take it for torchvision."""
    pytest.importorskip("transformers")  # timm's other needs come with it
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(timm_models, "_importable", lambda name: False)
    try:
        package = timm_models.timm()
    except ImportError:
        pytest.skip("timm isn't installed")
    assert package.create_model("resnet10t")
    stand_ins = [name for name in sys.modules if name.partition(".")[0] == "torchvision"]
    assert not any(type(sys.modules[name]).__name__ == "MagicMock" for name in stand_ins)


@pytest.mark.sweep("the zoo")
@third_party
def test_zoo_quick(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert main(["run", "zoo", "--quick", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "zoo_cpu.json").read_text())["rows"]
    assert rows[0]["name"] == "transformers/bert"
    assert all("error" in row["arms"][level] for row in rows for level in LEVELS)
