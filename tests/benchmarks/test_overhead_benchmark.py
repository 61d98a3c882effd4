"""The benchmarks of small steps, of evaluation and of what being ready costs: tiny runs."""

import pytest
import torch

from benchmarks import overhead, serving
from benchmarks.harness.report import Settings


@pytest.mark.slow("a benchmark's own test, which runs it small")
def test_overhead_tiny() -> None:
    threads = torch.get_num_threads()
    report = overhead.run(Settings(torch.device("cpu"), quick=True))
    assert torch.get_num_threads() == threads
    assert len(report.tables) == 2
    assert len(report.verdicts) == 2
    for arms in report.data["seconds"].values():
        assert set(arms) == {overhead.PEER, *overhead.OURS}
        for phases in arms.values():
            assert all(len(samples) == 2 for samples in phases.values())
            whole = torch.tensor(phases.pop(overhead.WHOLE))
            torch.testing.assert_close(sum(map(torch.tensor, phases.values())), whole)


@pytest.mark.slow("a benchmark's own test, which runs it small")
def test_serving_tiny() -> None:
    pytest.importorskip("transformers")
    report = serving.run(Settings(torch.device("cpu"), quick=True))
    ((name, arms),) = report.data["seconds"].items()
    assert name == "GPT-2, B1, 4 + 3 tokens"
    assert tuple(arms) == serving.ARMS
    assert all(len(times) == serving.TINY.rounds for times in arms.values())
    assert len(report.verdicts) == 1
