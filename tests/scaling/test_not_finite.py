"""NaN that comes with the data or from the loss: the first thing that is said."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_of import module_of
from overflowing import FP16, mlp
from torch import nn

from mpcompile import MPOptimizer, diagnose, loss_scale_of, mpcompile

NAN = float("nan")
MASK = torch.zeros(4).index_fill(0, torch.tensor([1]), -torch.inf)
DATA, TARGETS = "look at the data", "look at the targets"


def said_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [r for r in caplog.records if r.name == "mpcompile.scale" and r.levelno > logging.INFO]


def batch(kind: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Inputs, targets, and a factor of the loss."""
    x, y = torch.randn(4, 8), torch.randn(4, 4)
    if kind == "inputs":
        x[0, 0] = NAN
    if kind == "targets":
        y[0, 0] = NAN
    return x, y, torch.inf if kind == "loss" else 1.0


@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize(
    ("kind", "said"), [("inputs", DATA), ("targets", TARGETS), ("loss", TARGETS)]
)
def test_a_training_says_where_to_look(
    kind: str, said: str, generated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, in the first step, and not that a loss scale is found so."""
    model = mpcompile(mlp(), **FP16)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if generated:
        optimizer = MPOptimizer(optimizer, emit="eager")
    for _ in range(3):
        x, y, factor = batch(kind)
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) * factor).backward()
        optimizer.step()
        (record,) = said_in(caplog)
    assert record.name == "mpcompile.scale"
    assert record.getMessage().startswith("mpcompile: ")
    assert said in record.getMessage()


def test_without_a_scale_none_is_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    """In BF16 no graph has one; an MPOptimizer skips the steps all the same."""
    model = mpcompile(mlp(), dtype=torch.bfloat16, emit="eager")
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), emit="eager")
    for kind in ("inputs", "good"):  # of two in a row scaling/stays_finite.py warns
        x, y, _ = batch(kind)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    (record,) = said_in(caplog)
    assert "no graph has a scale, so look at the data" in record.getMessage()


def test_of_bad_first_batches_no_line_says_that_a_scale_is_found_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The start is found in the first backward that is finite."""
    model = mpcompile(mlp(), **FP16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = []
    for kind in ("targets", "targets", "targets", "fine"):
        x, y, _ = batch(kind)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        values.append(loss_scale_of(model).value)
    assert loss_scale_of(model).skipped_steps == 3
    assert values[:3] == [2.0**15, 2.0**14, 2.0**13]
    assert not loss_scale_of(model).fitting
    (record,) = said_in(caplog)
    assert TARGETS in record.getMessage()


def test_a_mask_of_minus_infinity_is_no_bad_data(caplog: pytest.LogCaptureFixture) -> None:
    def forward(m: Any, x: torch.Tensor, mask: torch.Tensor) -> Any:
        return (m.layer(x) + mask).softmax(-1)

    model = mpcompile(module_of(forward, layer=nn.Linear(8, 4)), **FP16)
    (model(torch.randn(4, 8), MASK).square().sum() * NAN).backward()
    (record,) = said_in(caplog)
    assert TARGETS in record.getMessage()


def test_masked_results_end_no_search(caplog: pytest.LogCaptureFixture) -> None:
    model = mpcompile(module_of(lambda m, x: m.layer(x) + MASK, layer=nn.Linear(8, 4)), **FP16)
    (model(torch.ones(64, 8)).softmax(-1).square().sum() * 1e3).backward()
    assert loss_scale_of(model).search.found
    assert said_in(caplog) == []


def test_the_graph_that_got_the_nan_first_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def forward(m: Any, image: torch.Tensor) -> Any:
        hidden = m.first(image)
        torch._dynamo.graph_break()
        return m.last(hidden)

    model = mpcompile(module_of(forward, first=nn.Linear(8, 8), last=nn.Linear(8, 4)), **FP16)
    model(torch.full((4, 8), NAN)).sum().backward()
    (record,) = said_in(caplog)
    assert "hidden" not in record.getMessage()
    assert DATA in record.getMessage()


def test_a_model_that_overflows_is_not_called_bad_data(caplog: pytest.LogCaptureFixture) -> None:
    model = mpcompile(mlp(), **FP16)
    with torch.no_grad():
        model[2].weight.fill_(1e5)  # type: ignore[index, union-attr, operator]
    model(torch.ones(4, 8)).sum().backward()
    (record,) = said_in(caplog)
    assert "the model's results are not, at finite inputs" in record.getMessage()


def _loss_of(targets: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda out: F.mse_loss(out, targets)


def test_diagnose_looks_at_inputs_parameters_and_targets_first() -> None:
    x, bad, y, bad_y = (
        torch.ones(4, 8),
        torch.full((4, 8), NAN),
        torch.ones(4, 4),
        torch.full((4, 4), NAN),
    )
    assert diagnose(mlp(), x, loss_fn=_loss_of(y)).notes == ()
    report = diagnose(mlp(), bad, loss_fn=_loss_of(y))
    assert "the loss is not finite, but no operator made it so\n\nnote: the inputs" in str(report)
    (note,) = report.notes
    assert note == "the inputs hold NaN or infinity (input): look at the data"
    by_name = functools.partial(F.mse_loss, target=bad_y)
    for loss, name in ((_loss_of(bad_y), "targets"), (by_name, "target")):
        (note,) = diagnose(mlp(), x, loss_fn=loss).notes
        assert note == f"loss_fn reads NaN or infinity ({name}): {TARGETS}"
    model = mlp()
    with torch.no_grad():
        model[0].bias[0] = NAN  # type: ignore[index, operator]
    (note,) = diagnose(model, x, loss_fn=_loss_of(y)).notes
    assert note == "parameters or buffers hold NaN or infinity: 0.bias"
    (note,) = diagnose(mlp(), x, loss_fn=lambda out: out.mean() * NAN).notes
    assert "look at the targets, and at loss_fn" in note
