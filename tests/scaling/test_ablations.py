"""Master weights and loss scaling left out, on a smaller scale than the benchmark: what breaks."""

import dataclasses
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from benchmarks import ablations
from benchmarks.ablations import (
    DYNAMIC,
    FP32,
    HALF_WEIGHTS,
    MASTERS,
    SCALES,
    UNSCALED,
    Magnitudes,
    Outcome,
    lost,
    scaled_verdicts,
    stored_verdicts,
    train_scaled,
    train_stored,
    vanishes,
)
from benchmarks.figures import draw_ablations
from benchmarks.harness.report import Settings

SEEDS = (0, 1, 2)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# -- what FP16 loses ------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1, -1], ids=["away from zero", "towards zero"])
def test_updates_vanish_around_2_to_the_minus_11_of_the_weight(sign: int) -> None:
    """Every normal FP16 weight: none below 2^-12 survives, none above 2^-11 vanishes."""
    weights = torch.arange(2**10, 31 * 2**10, dtype=torch.int16).view(torch.float16).float()
    assert vanishes(weights, sign * 0.99 * 2.0**-12 * weights).all()
    assert not vanishes(weights, sign * 1.01 * 2.0**-11 * weights).any()
    between = vanishes(weights, sign * 1.5 * 2.0**-12 * weights)
    assert between.any()
    assert not between.all()


@pytest.mark.parametrize("scale", [1.0, 8.0, 1024.0])
def test_the_histogram_knows_what_rounds_to_zero(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.exp2(-25 + 8 * torch.randn(10_000, generator=generator))
    values = values * (torch.rand(10_000, generator=generator) - 0.5).sign()
    values[:100] = 0
    seen = Magnitudes()
    for part in values.split(777):
        seen.add(part)
    zeros = ((values * scale).half() == 0).double().mean().item()
    assert 0.01 < zeros < 0.9
    assert lost(seen.shares(), scale) == pytest.approx(zeros, abs=1e-9)
    assert sum(seen.shares().values()) == pytest.approx(0.99)


# -- master weights -------------------------------------------------------------------------------


@pytest.mark.slow("trainings that overflow, against FP64")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_without_master_weights_training_stalls(seed: int) -> None:
    steps = 250
    full, masters, half = (train_stored(arm, seed, steps) for arm in (FP32, MASTERS, HALF_WEIGHTS))
    assert half.shares["updates that vanish in FP16"] > 0.9
    assert full.progress > 0.01
    assert masters.progress == pytest.approx(full.progress, rel=0.02)
    assert half.progress < full.progress / 3


def test_updates_that_are_not_small_need_no_master_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: it is the size of the updates that makes the difference, not FP16 as such."""
    monkeypatch.setattr(ablations, "SMALL_RATE", 0.1)
    full, half = (train_stored(arm, 0, 100) for arm in (FP32, HALF_WEIGHTS))
    assert half.shares["updates that vanish in FP16"] < 0.5
    assert full.progress > 1
    assert half.progress == pytest.approx(full.progress, rel=0.05)


# -- loss scaling ---------------------------------------------------------------------------------


@pytest.mark.slow("trainings that overflow, against FP64")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_without_loss_scaling_training_stalls(seed: int) -> None:
    steps = 140
    gradients = Magnitudes()
    full = train_scaled(FP32, seed, steps, gradients=gradients)
    unscaled, eight, dynamic = (
        train_scaled(arm, seed, steps) for arm in (UNSCALED, "FP16, scale 8", DYNAMIC)
    )
    plain, by_8 = (lost(gradients.shares(), scale) for scale in (1, 8))
    assert by_8 + 0.2 < plain > 0.8
    zero = "weight gradients zero"
    assert unscaled.shares[zero] > full.shares[zero] + 0.5
    assert dynamic.shares[zero] == pytest.approx(full.shares[zero], abs=0.005)
    assert full.after < full.before / 4
    assert unscaled.after > 1.5 * full.after
    assert eight.after < 1.1 * full.after
    assert dynamic.after == pytest.approx(full.after, rel=0.02)
    assert dynamic.skipped_steps <= 2


def test_gradients_that_are_not_small_need_no_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same network with the plain mean for a loss."""
    monkeypatch.setattr(ablations, "LOSS_WEIGHT", 1.0)
    full, unscaled = (train_scaled(arm, 0, 100) for arm in (FP32, UNSCALED))
    assert full.after < full.before / 2
    assert unscaled.after == pytest.approx(full.after, rel=0.02)


# -- the report -----------------------------------------------------------------------------------


def _ended_at(after: float) -> list[Outcome]:
    return [Outcome(before=2.0, after=after, steps=1, curve=[after], shares={})] * 2


def test_verdicts_tell_a_stall_from_none() -> None:
    same = dict.fromkeys((FP32, MASTERS, HALF_WEIGHTS, *SCALES), _ended_at(1.0))
    stored, scaled = stored_verdicts(same), scaled_verdicts(same)
    assert list(stored.values()) == [True, False]
    assert list(scaled.values()) == [False, True, True, True]
    worse = [_ended_at(1.0)[0], dataclasses.replace(_ended_at(1.0)[0], after=1.9)]
    stalled = {**dict.fromkeys((MASTERS, *SCALES), worse), FP32: _ended_at(1.0)}
    stalled[HALF_WEIGHTS] = _ended_at(1.9)
    assert list(stored_verdicts(stalled).values()) == [False, True]
    assert list(scaled_verdicts(stalled).values()) == [False] * 4, "one seed of two"


@pytest.mark.slow("trainings that overflow, against FP64")
def test_the_figure_is_a_function_of_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data = ablations.run(Settings(device=torch.device("cpu"), quick=True)).data
    first, again = tmp_path / "ablations.svg", tmp_path / "again" / "ablations.svg"
    again.parent.mkdir()
    for path in (first, again):
        draw_ablations(path, data)
    assert first.read_bytes() == again.read_bytes()
    assert ET.parse(first).getroot().tag.endswith("svg")
