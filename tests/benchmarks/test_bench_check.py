"""`make bench-check`: which ratios fell, and against which committed results."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import __main__ as commands
from benchmarks.__main__ import main, registry
from benchmarks.harness import checking
from benchmarks.harness.checking import ALIKE, NOISE, check, committed, fallen, ratios_of
from benchmarks.harness.report import RESULTS, Report, environment, plain
from benchmarks.harness.timing import Ratio

CPU = torch.device("cpu")


def ratio(value: float, width: float = 0.0) -> Ratio:
    return Ratio(value, value, value - width, value + width)


def report(*values: float) -> Report:
    rows = {f"net {i}": {"ours over theirs": ratio(value)} for i, value in enumerate(values)}
    return Report("", [], [], {}, {"ratios": plain(rows)})


def named(*values: float) -> dict[str, Ratio]:
    return ratios_of(report(*values).data)


def test_ratios_are_named_by_row_and_pair() -> None:
    assert named(1.5) == {"net 0: ours over theirs": ratio(1.5)}


def test_a_ratio_fell_if_its_whole_interval_lies_below_the_other_less_noise() -> None:
    before = {name: ratio(2.0, 0.1) for name in ("far", "near", "wide", "gone")}
    edge = 1.9 * (1 - NOISE)
    found = {
        "far": ratio(edge - 0.02, 0.01),
        "near": ratio(edge + 0.02, 0.01),
        "wide": ratio(edge - 0.02, 0.03),
        "new": ratio(0.1),
    }
    assert fallen(found, before) == {"far"}


def test_what_is_low_once_is_noise_and_what_is_low_each_time_fell() -> None:
    runs: Iterator[Report] = iter([report(0.5, 0.5, 1.0), report(0.5, 1.0, 0.5), report(0.5, 1, 1)])
    checked = check(lambda: next(runs), named(1.0, 1.0, 1.0))
    assert checked.fallen == ["net 0: ours over theirs"]
    assert not list(runs)


def test_a_run_in_which_nothing_is_low_is_the_last() -> None:
    runs = iter([report(1.0), report(0.1)])
    assert check(lambda: next(runs), named(1.0)).fallen == []
    assert len(list(runs)) == 1


def test_results_are_of_a_machine_with_the_same_units_and_threads(tmp_path: Path) -> None:
    here = dict.fromkeys(ALIKE, "here")
    (tmp_path / "below").mkdir()
    for folder, record in (("", here | {"matrix units": "none"}), ("below", here)):
        text = json.dumps({"folder": folder, "environment": record})
        (tmp_path / folder / "fast_cpu.json").write_text(text)
    assert committed("fast_cpu", here, tmp_path)["folder"] == "below"
    assert committed("fast_cpu", here | {"threads": "64"}, tmp_path) is None
    assert committed("other_cpu", here, tmp_path) is None


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A benchmark whose reruns all show half of what is committed; where that is."""
    module = ModuleType("fast", "A fast one.")
    module.rerun = lambda device: report(1.0)  # type: ignore[attr-defined]
    slow = ModuleType("slow", "A slow one.")
    monkeypatch.setattr(commands, "registry", lambda: {"fast": module, "slow": slow})
    monkeypatch.setattr(
        commands, "committed", lambda name, record: committed(name, record, tmp_path)
    )
    return tmp_path


@pytest.mark.parametrize(("before", "code"), [(2.0, 1), (1.05, 0)])
def test_the_exit_code_says_whether_one_fell(
    fast: Path, before: float, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"environment": environment(CPU), **report(before).data}
    (fast / "fast_cpu.json").write_text(json.dumps(record))
    assert main(["check"]) == code
    assert ("FELL" in capsys.readouterr().out) == bool(code)


def test_a_machine_without_committed_results_is_no_success(
    fast: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "fast"]) == 2
    assert "fast: no committed results of a machine like this one (name:" in capsys.readouterr().out


def test_committed_results_of_other_threads_are_named(
    fast: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands.os, "cpu_count", lambda: 64)
    threads = "7" if torch.get_num_threads() != 7 else "8"
    record = {"environment": environment(CPU) | {"threads": threads}, **report(2.0).data}
    (fast / "fast_cpu.json").write_text(json.dumps(record))
    assert main(["check", "fast"]) == 2
    assert f"; with OMP_NUM_THREADS={threads} there are some" in capsys.readouterr().out


def test_a_slow_benchmark_is_refused(fast: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "slow"])
    assert "slow is not rerun by check, which knows fast" in capsys.readouterr().err


def test_what_can_be_rerun_is_committed_with_ratios() -> None:
    names = [name for name, module in registry().items() if hasattr(module, "rerun")]
    assert names
    for name in names:
        assert ratios_of(json.loads((RESULTS / f"{name}_cpu.json").read_text())), name
    assert checking.ATTEMPTS > 1  # one run on a busy machine would say nothing
