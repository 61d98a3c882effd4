"""Whole training steps against every peer: geometric means, and a model that people train."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.__main__ import main
from benchmarks.harness.peak import peak_bytes
from benchmarks.harness.ways import AUTOCAST, COMPILED, OURS
from benchmarks.peers import geometric_mean, make_report, measure_all
from benchmarks.real_models import BY_DEVICE, TASKS, TINY, quick
from benchmarks.zoo.timm_models import timm


def test_the_geometric_mean_of_twice_and_half_is_one() -> None:
    mean, low, high = geometric_mean([([2.0, 2.0], [1.0, 1.0]), ([1.0, 1.0], [2.0, 2.0])])
    assert (mean, low, high) == pytest.approx((1.0, 1.0, 1.0))


def test_the_interval_of_a_geometric_mean_holds_what_the_rounds_say() -> None:
    peer, ours = [1.0, 2.0, 4.0, 2.0, 2.0], [1.0] * 5
    mean, low, high = geometric_mean([(peer, ours)])
    assert mean == pytest.approx(2.0)
    assert 1.0 <= low <= 2.0 <= high <= 4.0
    assert low < high


def test_the_peak_is_what_is_there_at_once() -> None:
    kept: list[Tensor] = []

    def step() -> None:
        kept.clear()  # what the step before has left: 400 bytes
        first = torch.ones(1000)
        second = torch.ones(500)
        del first, second
        kept.append(torch.ones(100))

    assert peak_bytes(step, torch.device("cpu")) == 4 * 1500 - 400


@pytest.mark.sweep("runs a benchmark, small")
def test_a_language_model_of_transformers() -> None:
    work = dataclasses.replace(quick(), tasks=(TINY[0].name,))
    rows = measure_all(work, torch.device("cpu"))
    (row,) = rows.values()
    arms = {COMPILED, AUTOCAST, *OURS}
    assert set(row.first) == arms
    left = set(row.left_out)  # a peer whose one step took ten times as long as the fastest
    assert left <= {COMPILED, AUTOCAST}
    assert set(row.seconds) == set(row.peak) == arms - left
    assert all(len(samples) == work.rounds for samples in row.seconds.values())
    report = make_report("Models", work, rows, [], None)
    assert not report.verdicts
    peers = {column for table in report.tables for column in table.columns}
    assert "eager FP32" not in peers  # what was not measured has no column


def test_names_of_models_are_their_own() -> None:
    """A process finds its model by the name."""
    assert len({task.name for task in TASKS}) == len(TASKS)
    assert all(task in TASKS for tasks in BY_DEVICE.values() for task in tasks)


@pytest.mark.sweep("runs a benchmark, small")
def test_a_first_step_with_and_without_verification(tmp_path: Path) -> None:
    assert main(["run", "verified", "--quick", "--out", str(tmp_path)]) == 0
    (ways,) = json.loads((tmp_path / "verified_cpu.json").read_text())["models"].values()
    (compared,), (left,) = (ways[way]["said"] for way in ("verified", "not verified"))
    assert "forward: verified" in compared
    assert "not verified" in left
    for way in ways.values():
        assert way["peak"][0] > 2**28  # more than torch itself takes


@pytest.mark.sweep("runs a benchmark, small")
def test_bytes_by_cause(tmp_path: Path) -> None:
    """Autocast rounds each weight of a ResNet-18 once, and widens each of its gradients once."""
    assert main(["run", "cpu_traffic", "--quick", "--out", str(tmp_path)]) == 0
    arms = json.loads((tmp_path / "cpu_traffic.json").read_text())["counted"][TINY[1].name]
    weights = sum(p.numel() for p in timm().create_model("resnet18").parameters() if p.dim() > 1)
    there = 6 * (3 * 32 * 32 * 2 + 1000)  # the images, and the bias of the head
    casts = {"weights' casts": 6 * weights + there, "gradients' casts": 6 * weights}
    peer, ours = (arms[arm]["bytes"] for arm in (AUTOCAST, OURS[0]))
    assert casts.items() <= peer.items()
    assert 0 < ours["gradients' casts"] < 6 * weights  # small products stay in FP32
