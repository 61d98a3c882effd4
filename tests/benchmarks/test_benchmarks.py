"""The benchmarks' machinery: arithmetic on made-up timings, the registry, one tiny run of each."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from repository import ROOT

from benchmarks import first_steps, gpt, optimizer_step, serving, step_profile
from benchmarks import saved_bytes as cases
from benchmarks.__main__ import main, registry
from benchmarks.first_steps.trainings import TINY as TINY_TRAININGS
from benchmarks.gpt import verdicts
from benchmarks.harness.processes import call_elsewhere, calls_elsewhere, starts
from benchmarks.harness.report import Report, Settings, Table, environment, paragraphs, plain
from benchmarks.harness.timing import Arm, far_behind, ratio, summarize, take_turns
from benchmarks.papers.rule import deviations

CPU = torch.device("cpu")


class FakeMachine:
    """A clock that only steps move: each costs its arm's seconds, times the drift of the moment."""

    def __init__(self, drift: Sequence[float] = (1.0,)) -> None:
        self.now = 0.0
        self.order: list[str] = []
        self.drift = itertools.cycle(drift)

    def arm(self, name: str, seconds: float) -> Arm:
        def step() -> None:
            self.order.append(name)
            self.now += seconds * next(self.drift)

        return Arm(name, step)

    def clock(self) -> float:
        return self.now


def test_turns_are_interleaved_and_each_round_starts_with_another_arm() -> None:
    machine = FakeMachine()
    arms = [machine.arm(name, 1.0) for name in "abc"]
    take_turns(arms, rounds=3, steps=1, settle=0, clock=machine.clock)
    assert "".join(machine.order) == "abcbcacab"


def test_a_sample_is_seconds_per_step_and_settling_does_not_count() -> None:
    machine = FakeMachine()
    arms = [machine.arm("fast", 0.5), machine.arm("slow", 2.0)]
    samples = take_turns(arms, rounds=2, steps=4, settle=1, clock=machine.clock)
    assert samples == {"fast": [0.5, 0.5], "slow": [2.0, 2.0]}
    assert machine.order.count("fast") == 2 * (4 + 1)


def test_the_device_is_idle_at_both_ends() -> None:
    machine = FakeMachine()
    waits: list[int] = []

    def wait() -> None:
        waits.append(len(machine.order))

    arms = [machine.arm("a", 1.0)]
    take_turns(arms, rounds=1, steps=2, settle=1, wait=wait, clock=machine.clock)
    assert waits == [1, 3]


def test_a_machine_that_slows_down_leaves_the_ratio_alone() -> None:
    """Ten times slower in the last two rounds of three: the paired ratio does not see it."""
    machine = FakeMachine(drift=[1.0] * 2 + [10.0] * 4)
    arms = [machine.arm("base", 3.0), machine.arm("ours", 2.0)]
    samples = take_turns(arms, rounds=3, steps=1, settle=0, clock=machine.clock)
    assert samples["base"] == [3.0, 30.0, 30.0]
    found = ratio(samples["base"], samples["ours"])
    assert (found.paired, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_an_arm_that_is_far_behind() -> None:
    machine = FakeMachine()
    arms = [machine.arm(name, s) for name, s in (("a", 2.0), ("b", 19.0), ("c", 20.0))]
    assert far_behind(arms, clock=machine.clock) == {"c": 20.0}
    assert far_behind(arms[1:], clock=machine.clock) == {}


def test_what_is_left_out_has_no_verdict() -> None:
    """And where nothing runs low, FP32's speed is what is to be kept."""
    same = ratio([1.0], [1.0])
    over_fp32 = {f"{ours} over {gpt.FP32}": same for ours in gpt.OURS}
    kept = dict(verdicts(over_fp32, dict.fromkeys(gpt.OURS, False)))
    assert list(kept.values()) == [True, True]
    missed = dict(verdicts(over_fp32, dict.fromkeys(gpt.OURS, True)))
    assert list(missed.values()) == [False, False]


def test_summary_is_median_and_percentiles() -> None:
    found = summarize([float(i) for i in range(11)])
    assert (found.median, found.p10, found.p90) == (5.0, 1.0, 9.0)
    assert found.text() == "5000.0 [1000.0, 9000.0]"
    assert found.text(unit=1, digits=2) == "5.00 [1.00, 9.00]"


def test_one_outlier_moves_neither_ratio() -> None:
    base, ours = [2.0] * 9 + [200.0], [1.0] * 10
    found = ratio(base, ours)
    assert (found.of_medians, found.paired, found.low, found.high) == (2.0, 2.0, 2.0, 2.0)


def test_the_interval_holds_the_ratio_and_narrows_with_the_noise() -> None:
    generator = torch.Generator().manual_seed(0)

    def noisy(noise: float) -> float:
        base = (2 + noise * torch.randn(40, generator=generator)).tolist()
        found = ratio(base, [1.0] * 40)
        assert found.low <= found.paired <= found.high
        assert found.low < 2 < found.high
        return found.high - found.low

    assert noisy(0.01) < noisy(0.3)


def test_ratio_wants_arms_of_the_same_rounds() -> None:
    with pytest.raises(ValueError, match="got 2 and 3"):
        ratio([1.0, 1.0], [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="got 0 and 0"):
        ratio([], [])


def test_environment_names_no_path() -> None:
    found = environment(CPU)
    assert {"date", "commit", "torch", "name", "threads", "device"} <= found.keys()
    assert not any(str(ROOT) in value for value in found.values())


def test_report_writes_a_table_and_every_number(tmp_path: Path) -> None:
    report = Report(
        title="A made-up report", notes=["One.", "Two."],
        tables=[Table("Times", ("arm", "ms"), [("fast", "1.0"), ("slow one", "12.5")])],
        verdicts={"fast": True, "small": False}, data={"samples": [1.0, 12.5]},
    )  # fmt: skip
    readable, complete = report.write(tmp_path / "results", "made_up", {"torch": "2"})
    assert "| arm      |   ms |\n|----------|-----:|\n| fast     |  1.0 |" in readable.read_text()
    assert "- yes: fast\n- NO: small" in readable.read_text()
    assert json.loads(complete.read_text())["samples"] == [1.0, 12.5]


def test_dataclasses_become_json_at_any_depth() -> None:
    found = plain({"a": [Arm("b", print)], "c": ({"d": Table("t", ("x",), [("1",)])}, 2.5)})
    table = {"title": "t", "columns": ["x"], "rows": [["1"]]}
    assert found == {"a": [{"name": "b", "step": print}], "c": [{"d": table}, 2.5]}


def test_notes_are_what_follows_the_summary() -> None:
    assert paragraphs("A summary.\n\nOne,\nand on.\n\nTwo.\n") == ["One,\nand on.", "Two."]
    assert paragraphs(None) == []


def test_a_fresh_process_starts_at_the_root_of_the_repository() -> None:
    assert call_elsewhere("os:getcwd") == str(ROOT)


def test_a_fresh_process_has_the_variables_that_it_is_given() -> None:
    assert call_elsewhere("os:getenv", "X", environment={"X": "a"}) == "a"


def test_what_a_fresh_process_prints_is_no_result() -> None:
    assert call_elsewhere("builtins:print", "noise") is None
    assert call_elsewhere("os:system", "echo noise") == 0


def test_one_fresh_process_serves_several_calls_until_one_fails() -> None:
    calls = calls_elsewhere("operator:truediv", [(1, 2), (3, 4), (1, 0), (1, 1)])
    assert [next(calls), next(calls)] == [0.5, 0.75]
    with pytest.raises(RuntimeError, match=r"(?s)operator:truediv: .* ended with 1.*ZeroDivision"):
        next(calls)


def test_a_warm_start_finds_what_the_cold_one_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "another")
    cold, warm = starts(2, "os:getenv", "TORCHINDUCTOR_CACHE_DIR")
    assert cold == warm != "another"
    assert starts(2, "os:getenv", "TORCHINDUCTOR_CACHE_DIR")[0] != cold


def test_registry_finds_each_benchmark() -> None:
    assert registry()["gpt"] is gpt
    beside = {"cuda_parts", "emucuda", "fakecuda", "gpu", "gpu_steps", "harness", "models"}
    assert not beside & registry().keys()
    assert all(callable(module.run) for module in registry().values())


def test_list_prints_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(registry())
    assert [line.split()[0] for line in lines if line.endswith("(cpu only)")] == [
        "ablations", "cpu_traffic", "gpu_traffic", "second_order", "serving",
        "step_profile", "verified", "zoo",
    ]  # fmt: skip


def test_a_benchmark_for_other_devices_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "ablations", "--device", "cuda"])
    assert "ablations is for cpu only" in capsys.readouterr().err


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "gpt", "gtp"])
    assert "no benchmark 'gtp'; known: ablations, cpu_traffic," in capsys.readouterr().err


def test_without_a_package_that_it_needs_it_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "NEEDS", ("no_such_package",))
    assert main(["run", "serving", "--out", str(tmp_path)]) == 0
    assert "serving: skipped, because no_such_package is not installed" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("a benchmark's own test, which runs it small")
def test_gpt_tiny(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "gpt", "--quick", "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "gpt_cpu.json").read_text())
    losses = data["first_loss"]
    assert losses.keys() == {*gpt.ARMS, gpt.UNPADDED}
    assert all(abs(loss - losses[gpt.FP32]) < 0.02 for loss in losses.values())
    assert data["saved_bytes"][gpt.O2] < data["saved_bytes"][gpt.FP32]
    assert "mpcompile O1 over compile FP32" in capsys.readouterr().out


@pytest.mark.slow("a benchmark's own test, which runs it small")
def test_optimizer_step_tiny(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "optimizer_step", "--quick", "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "optimizer_step_cpu.json").read_text())
    arms = (*optimizer_step.OURS, *optimizer_step.PEERS)
    assert data["seconds_per_step"].keys() == {arm.name for arm in arms}
    assert "GradScaler + fused AdamW" in capsys.readouterr().out


@pytest.mark.sweep("runs a benchmark, small")
def test_saved_bytes_tiny(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "saved_bytes", "--quick", "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "saved_bytes_cpu.json").read_text())
    *_, small = data["bytes"].values()
    assert {way: total["all"] for way, total in small.items()} == data["held_by_autograd"]
    for model in data["bytes"].values():
        half, full = model[cases.HALF.name], model[cases.FP32.name]
        assert half["all"] < model[cases.O1.name]["all"] < full["all"]
        assert full["copies"] == model[cases.STEPPED.name]["copies"] == 0
        assert model[cases.AUTOCAST.name]["copies"] > 0
    assert "mpcompile O2, MPOptimizer, budget 0.5" in capsys.readouterr().out


@pytest.mark.sweep("runs a benchmark, small")
def test_first_steps_tiny(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "first_steps", "--quick", "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "first_steps_cpu.json").read_text())
    assert list(data["runs"]) == [training.name for training in TINY_TRAININGS.trainings]
    for level in first_steps.LEVELS:
        found, fixed = (first_steps.arm(level, s) for s in (first_steps.FOUND, first_steps.FIXED))
        for runs in data["runs"].values():
            assert not any(runs[found]["skipped"])
            assert runs[fixed]["again"] == 0
        large = data["runs"]["Autoencoder, summed squares"]
        # 2**19, halved until it fits, less the headroom; the other one skips both of its steps. One
        # more run compares two scales.
        assert large[found]["first"] == [2.0**16 / 2 ** (large[found]["again"] - 1)]
        assert large[fixed]["skipped"] == [2]
        assert data["loss_difference"]["MLP"][found] < 1e-3
    assert list(data["verdicts"].values())[:2] == [True, True]
    assert all(len(first["warm"]) == 1 for first in data["deep"].values())
    assert "What the search costs" in capsys.readouterr().out


@pytest.mark.slow("a benchmark's own test, which runs it small")
def test_step_profile_tiny() -> None:
    found = step_profile.run(Settings(device=CPU, quick=True)).data["profiled"]
    every = [kinds for arms in found.values() for kinds in arms.values()]
    assert all(k[step_profile.PRODUCTS] > 0 < k[step_profile.OPTIMIZER] for k in every)


def test_deviations_are_of_the_mean_and_of_the_worst_pair() -> None:
    mean, worst = deviations([1.0, 2.0, 3.0], [1.5, 2.0, 2.0])
    assert mean == pytest.approx(-0.5 / 3)
    assert worst == -1.0
