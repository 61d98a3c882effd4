"""The benchmarks of small steps, of evaluation and of what being ready costs: tiny runs."""

import time

import pytest
import torch

from benchmarks import overhead, serving
from benchmarks.harness.report import Settings


@pytest.mark.slow("a benchmark's own test, which runs it small")
def test_overhead_tiny() -> None:
    threads = torch.get_num_threads()
    report = overhead.run(Settings(torch.device("cpu"), quick=True))
    assert torch.get_num_threads() == threads
    assert len(report.tables) == 3
    assert len(report.verdicts) == 2
    for arms in report.data["seconds"].values():
        assert set(arms) == {overhead.PEER, *overhead.OURS}
        for phases in arms.values():
            assert all(len(samples) == 2 for samples in phases.values())
            whole = torch.tensor(phases.pop(overhead.WHOLE))
            torch.testing.assert_close(sum(map(torch.tensor, phases.values())), whole)
    for parts in report.data["parts"].values():
        whole = parts.pop(overhead.WHOLE)
        assert parts.keys() == overhead.PARTS.keys()
        assert sum(parts.values()) < whole
    reads = [parts["copies handed to a graph"] for parts in report.data["parts"].values()]
    assert reads[0] == 0 < reads[1]  # O1 has no copies


def test_the_clock_counts_no_time_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = overhead.Clock(), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    inner = clock.around("inner", wait)

    def calls() -> None:
        wait(1.0)
        inner(2.0)
        wait(4.0)
        inner(8.0)
        raise ValueError

    with pytest.raises(ValueError):
        clock.around("outer", calls)()
    assert clock.spent == {"inner": 10.0, "outer": 5.0}


@pytest.mark.slow("a benchmark's own test, which runs it small")
def test_serving_tiny() -> None:
    pytest.importorskip("transformers")
    report = serving.run(Settings(torch.device("cpu"), quick=True))
    ((name, arms),) = report.data["seconds"].items()
    assert name == "GPT-2, B1, 4 + 3 tokens"
    assert tuple(arms) == serving.ARMS
    assert all(len(times) == serving.TINY.rounds for times in arms.values())
    assert len(report.verdicts) == 1
