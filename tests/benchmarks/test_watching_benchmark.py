"""The benchmark of what being ready costs, in a tiny run."""

from __future__ import annotations

import torch

from benchmarks import watching
from benchmarks.harness.report import Settings


def test_watching_tiny() -> None:
    report = watching.run(Settings(torch.device("cpu"), quick=True))
    arms = report.data["seconds_per_step"]
    assert set(arms) == {"MLP, AdamW", "MLP, MPOptimizer"}
    assert all(set(times) == {"ready", "off"} for times in arms.values())
    copies = report.data["copies"]
    assert copies["seconds"] > 0
    assert copies["bytes"] > copies["nodes"]
    assert len(report.verdicts) == 2
