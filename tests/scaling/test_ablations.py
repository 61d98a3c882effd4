"""Master weights and loss scaling left out, on a smaller scale than the benchmark: what breaks."""

import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import ablations
from benchmarks.ablations import FP32, HALF_WEIGHTS, MASTERS, Outcome, train, vanishes, verdicts
from benchmarks.digits import digits
from benchmarks.figures import draw_ablations
from benchmarks.harness.report import Settings
from mpcompile import mpcompile

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


# -- master weights -------------------------------------------------------------------------------


@pytest.mark.slow("trainings that overflow, against FP64")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_without_master_weights_training_stalls(seed: int) -> None:
    steps = 250
    full, masters, half = (train(arm, seed, steps) for arm in (FP32, MASTERS, HALF_WEIGHTS))
    assert half.vanishing > 0.9
    assert full.progress > 0.01
    assert masters.progress == pytest.approx(full.progress, rel=0.02)
    assert half.progress < full.progress / 3


def test_updates_that_are_not_small_need_no_master_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: it is the size of the updates that makes the difference, not FP16 as such."""
    monkeypatch.setattr(ablations, "SMALL_RATE", 0.1)
    full, half = (train(arm, 0, 100) for arm in (FP32, HALF_WEIGHTS))
    assert half.vanishing < 0.5
    assert full.progress > 1
    assert half.progress == pytest.approx(full.progress, rel=0.05)


# -- loss scaling ---------------------------------------------------------------------------------


def autoencoder_trained(loss_scale: str | float | None, seed: int, weight: float) -> float:
    """The loss of an autoencoder of digits after 140 steps of Adam; None: in FP32.

    Args:
        weight: of the loss. At 2^-11 gradients are as small as those of a mean over 2^24 outputs.
    """
    (images, _), (held_out, _) = digits(torch.device("cpu"))
    torch.manual_seed(seed)
    widths = itertools.pairwise((64, 128, 64, 32, 16, 32, 64, 128, 64))
    layers = [(nn.Linear(a, b), nn.Tanh()) for a, b in widths]
    model = nn.Sequential(*list(itertools.chain(*layers))[:-1])
    # Adam's own epsilon is larger than many of these gradients, even in FP32.
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-12)
    if loss_scale is not None:
        torch._dynamo.reset()
        mpcompile(model, dtype=torch.float16, loss_scale=loss_scale, emit="eager", strict=True)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(140):
        batch = images[torch.randint(len(images), (128,), generator=generator)]
        (weight * F.mse_loss(model(batch), batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return F.mse_loss(model.forward(held_out), held_out).item()


@pytest.mark.slow("trainings that overflow, against FP64")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_without_loss_scaling_training_stalls(seed: int) -> None:
    full, unscaled, eight, dynamic = (
        autoencoder_trained(scale, seed, 2.0**-11) for scale in (None, "none", 8.0, "dynamic")
    )
    assert full < 0.06  # of 0.24 before
    assert unscaled > 1.5 * full
    assert eight < 1.1 * full
    assert dynamic == pytest.approx(full, rel=0.02)


def test_gradients_that_are_not_small_need_no_scale() -> None:
    """The control: the same network with the plain mean for a loss."""
    full, unscaled = (autoencoder_trained(scale, 0, 1.0) for scale in (None, "none"))
    assert unscaled == pytest.approx(full, rel=0.02)


# -- the report -----------------------------------------------------------------------------------


def test_verdicts_tell_a_stall_from_none() -> None:
    def ended_at(*after: float) -> list[Outcome]:
        return [Outcome(before=2.0, after=one, steps=1, curve=[one]) for one in after]

    same = dict.fromkeys((FP32, MASTERS, HALF_WEIGHTS), ended_at(1.0, 1.0))
    assert list(verdicts(same).values()) == [True, False]
    stalled = {FP32: same[FP32], MASTERS: ended_at(1.0, 1.9), HALF_WEIGHTS: ended_at(1.9, 1.9)}
    assert list(verdicts(stalled).values()) == [False, True], "one seed of two"


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
