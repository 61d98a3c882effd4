"""The benchmark of models in evaluation, in a tiny run."""

from __future__ import annotations

import pytest
import torch

from benchmarks import serving
from benchmarks.harness.report import Settings


def test_serving_tiny() -> None:
    pytest.importorskip("transformers")
    report = serving.run(Settings(torch.device("cpu"), quick=True))
    ((name, arms),) = report.data["seconds"].items()
    assert name == "GPT-2, B1, 4 + 3 tokens"
    assert tuple(arms) == serving.ARMS
    assert all(len(times) == serving.TINY.rounds for times in arms.values())
    assert len(report.verdicts) == 1
