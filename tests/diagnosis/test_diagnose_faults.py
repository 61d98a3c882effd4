"""Planted faults are named at their module and line, in every situation, and cured by the pins."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from faulty import PLANTED, WIDTH, Planted, line_of
from torch import nn

from mpcompile import MPOptimizer, Policy, diagnose, mpcompile
from mpcompile.diagnosis import Report

REST = pytest.mark.sweep("the rest of a matrix of planted faults")

torch.manual_seed(1)
X, Y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)

LEVELS = ("O1", "O2")
# What is done to the model before it is diagnosed.
SITUATIONS = ("checkpointed", "broken", "owned", "both", "eager", "dynamic")


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(out, Y[: len(out)])


def assert_named(report: Report, planted: Planted) -> None:
    found = report.first
    assert found is not None, "no fault found"
    assert (found.kind, found.node.source) == (planted.kind, line_of(planted.at)), str(report)
    assert found.node.module == planted.path
    if planted.via:
        assert any(frame.startswith(f"{line_of(planted.via)} ") for frame in found.node.frames)
    assert report.faults == (found,), "one fault was planted"


def situated(planted: Planted, situation: str, level: str) -> tuple[nn.Module, Any]:
    """The model in that situation, and what must stay alive meanwhile."""
    broken = situation in ("broken", "both")
    model = planted.host(checkpointed=situation in ("checkpointed", "both"), broken=broken)
    if situation == "owned":
        return model, MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if situation in ("eager", "inductor", "dynamic"):
        emit = "eager" if situation == "dynamic" else situation
        dynamic = True if situation == "dynamic" else None
        options: dict[str, Any] = {"dtype": "float16", "level": level, "emit": emit}
        model = mpcompile(model, dynamic=dynamic, **options)
        for rows in (8, 6, 5)[: 3 if dynamic else 1]:
            loss_of(model(X[:rows])).backward()
        model.zero_grad()
    return model, None


def rows() -> Iterator[Any]:
    """Each fault at each level; and in each situation, of which the default run takes one."""
    for number, name in enumerate(PLANTED):
        for level in LEVELS:
            yield pytest.param(name, "plain", level, id=f"{name}-{level}")
            for place, situation in enumerate(SITUATIONS):
                sampled = (place, level) == (number % len(SITUATIONS), LEVELS[number % 5 % 2])
                marks = () if sampled else REST
                yield pytest.param(name, situation, level, marks=marks)
            marks = () if (name, level) == ("slope", "O2") else REST
            yield pytest.param(name, "inductor", level, marks=marks)


@pytest.mark.slow("runs a model step by step, many times")
@pytest.mark.parametrize(("name", "situation", "level"), list(rows()))
@pytest.mark.usefixtures("own_inductor_cache")
def test_it_is_named(name: str, situation: str, level: str) -> None:
    planted = PLANTED[name]
    model, _kept = situated(planted, situation, level)
    compiled = situation in ("eager", "inductor", "dynamic")  # its options hold
    options = {} if compiled else {"dtype": "float16", "level": level}
    assert_named(diagnose(model, X, loss_fn=loss_of, **options), planted)


def trained(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    loss = loss_of(model(X))
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}  # type: ignore[misc]


@pytest.mark.slow("runs a model step by step, many times")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [name for name, planted in PLANTED.items() if planted.cured])
def test_the_pins_cure_it(name: str, level: str) -> None:
    """The loss is within 1% of FP32's, and each gradient within 2%, or 0.1% of the norm of all: the
    gradient of a bias in front of a batch norm is made of rounding errors alone.
    """
    planted = PLANTED[name]
    options: dict[str, Any] = {"dtype": "float16", "level": level}
    report = diagnose(planted.host(), X, loss_fn=loss_of, **options)
    policy = Policy(nodes=dict.fromkeys(report.pins, "fp32"))
    loss, gradients = trained(planted.host())
    ours, found = trained(mpcompile(planted.host(), emit="eager", policy=policy, **options))
    assert ours == pytest.approx(loss, rel=0.01)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    for key, gradient in gradients.items():
        assert (found[key] - gradient).norm() <= 0.02 * gradient.norm() + 0.001 * norm, key
    if name == "faint":
        side = "part.side.weight"
        assert (found[side] - gradients[side]).norm() <= 0.02 * gradients[side].norm()
    assert diagnose(planted.host(), X, loss_fn=loss_of, policy=policy, **options).faults == ()
