"""Training that is saved between two whole steps and goes on elsewhere, as a whole or in pieces."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from whole_steps import BOTH, Run, Setting, batches

Step = Callable[..., Any]
BATCHES = batches(6, factors={1: 1e30, 4: 1e30})  # one skip before, one after


def started(setting: Setting, *, whole: bool, seed: int) -> tuple[Run, Step]:
    torch.manual_seed(seed)
    run = Run(whole, setting)
    _, optimizer, loss_of = run.classifier(Run.adamw)
    return run, run.step(run.usual(loss_of, optimizer))


def saved(run: Run) -> io.BytesIO:
    file = io.BytesIO()
    (model,), (optimizer,) = run.models, run.optimizers
    parts = {"model": model, "optimizer": optimizer, "scale": run.scale}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    file.seek(0)
    return file


def load(run: Run, file: io.BytesIO) -> None:
    state = torch.load(file)
    run.models[0].load_state_dict(state["model"])
    run.optimizers[0].load_state_dict(state["optimizer"])
    run.scale.load_state_dict(state["scale"])


@pytest.mark.slow("compiles whole steps of several kinds, against FP64")
@pytest.mark.sampled(3)
@BOTH
@pytest.mark.parametrize("then", ["whole", "pieces"])
@pytest.mark.parametrize("first", ["whole", "pieces"])
def test_it_goes_on_as_if_nothing_had_been(setting: Setting, first: str, then: str) -> None:
    run, step = started(setting, whole=first == "whole", seed=0)
    for batch in BATCHES[:3]:
        step(*batch)
    file = saved(run)
    losses = [step(*batch) for batch in BATCHES[3:]]

    again, step_again = started(setting, whole=then == "whole", seed=1)
    load(again, file)
    torch.testing.assert_close(
        [step_again(*batch) for batch in BATCHES[3:]], losses, equal_nan=True, rtol=1e-3, atol=1e-5
    )
    assert again.scale.skipped_steps == run.scale.skipped_steps
    ours, theirs = again.everything(), run.everything()
    exact = {"rtol": 0.0, "atol": 0.0} if first == then else {"rtol": 1e-5, "atol": 1e-6}
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if value is not None:
            torch.testing.assert_close(value, theirs[name], equal_nan=True, **exact)
