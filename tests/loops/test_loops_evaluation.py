"""Evaluation between training steps, other batch sizes, a smaller last batch; newcomers' loops."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import MOSTLY_O1, WAYS, Way, agreeing, finite, low_nodes, same, snapshot
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mpcompile import LossScale, MPCompileWarning, loss_scale_of, mpcompile


def classifier() -> nn.Module:
    layers = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.0), nn.Linear(32, 4)
    return nn.Sequential(*layers)


def data(size: int) -> DataLoader[Any]:
    x = torch.randn(size, 16)
    return DataLoader(TensorDataset(x, (x @ torch.randn(16, 4)).argmax(1)), batch_size=8)


@pytest.mark.slow_rows("a loop in each way of training, against FP64")
@agreeing(WAYS, tolerance=0.06, bf16=0.3)
def test_epochs_with_evaluation_and_a_smaller_last_batch(way: Way) -> None:
    """20 samples to train on in batches of 8, 8 and 4; 27 to evaluate on, the last batch of 3."""
    train, test = data(20), data(27)
    model = way.model(classifier())
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    batches = iter([b for _ in range(2) for b in train])
    for step, factor in way.steps(6, model, optimizer, planted=4):
        model.train()
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        (loss * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        way.log(loss)
        if step % 3 == 2:
            model.eval()
            with torch.no_grad():
                way.log(torch.stack([F.cross_entropy(model(x), y) for x, y in test]).mean())
    model.eval()
    with torch.inference_mode():
        way.log(F.cross_entropy(model(x), y).clone())


@agreeing(WAYS)
def test_evaluation_between_forward_and_backward(way: Way) -> None:
    """The backward still to come uses what its own forward saw, mode and scale."""
    model = way.model(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)))
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    x, y = torch.randn(4, 8, 16), torch.randint(4, (4, 8))
    for step, update in way.updates(4, model, optimizer, planted=2):
        loss = F.cross_entropy(model(x[step]), y[step])
        model.eval()
        with torch.no_grad():
            way.log(model(x[0]).norm())
        model.train()
        update(loss)


@agreeing(MOSTLY_O1)
def test_an_evaluation_that_forgot_no_grad(way: Way) -> None:
    """A forward with gradients whose backward never comes, overflowing at that."""
    model = way.model(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)))
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    x, y = torch.randn(4, 8, 16), torch.randint(4, (4, 8))
    for step, update in way.updates(4, model, optimizer, planted=2):
        update(F.cross_entropy(model(x[step]), y[step]))
        model.eval()
        model(x[step] * 1e30)
        way.log(F.cross_entropy(model(x[step]), y[step]))
        model.train()


# -- what newcomers do -------------------------------------------------------------------------


def test_compiled_twice() -> None:
    """The last call counts: its scale is the one that backs off."""
    first = LossScale.dynamic(init_scale=512.0)
    model = mpcompile(classifier(), dtype=torch.float16, emit="eager", loss_scale=first)
    scale = LossScale.dynamic(init_scale=1024.0)
    model = mpcompile(model, dtype=torch.float16, emit="eager", loss_scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    for factor in (1.0, 1e30):
        before = snapshot([model])
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * factor).backward()
        optimizer.step()
        assert same(before, snapshot([model])) == (factor > 1)
    assert (scale.value, first.value) == (512.0, 512.0)
    assert (scale.skipped_steps, first.skipped_steps) == (1, 0)


def test_a_grad_scaler_left_in() -> None:
    """Its steps are skipped until its own scale has backed off (README); nothing breaks."""
    model = mpcompile(classifier(), dtype=torch.float16, emit="eager", loss_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    before = snapshot([model])
    losses, loader = [], data(64)
    noticed = []
    for x, y in [b for _ in range(3) for b in loader]:
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            scaler.step(optimizer)
        noticed += [w for w in found if issubclass(w.category, MPCompileWarning)]
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        assert finite(model)
    assert len(noticed) == 1
    assert not same(before, snapshot([model]))
    assert sum(losses[-8:]) < sum(losses[:8])


def test_zero_grad_forgotten() -> None:
    """Gradients pile up as they do in FP32; one overflow makes all steps after it skip, visibly."""
    model = mpcompile(classifier(), dtype=torch.float16, emit="eager", loss_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(4, 8, 16), torch.randint(4, (4, 8))
    for step in range(4):
        (F.cross_entropy(model(x[step]), y[step]) * (1e30 if step == 1 else 1)).backward()
        optimizer.step()
        assert finite(model)
    assert loss_scale_of(model).skipped_steps == 3


def test_the_bound_forward_is_not_compiled() -> None:
    """`model.forward(x)` bypasses what a call runs, in torch too: plain FP32, gradients right."""
    model = mpcompile(classifier(), dtype=torch.float16, emit="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = snapshot([model])
    F.cross_entropy(model.forward(torch.randn(8, 16)), torch.randint(4, (8,))).backward()
    words = "Sequential was compiled but never called, yet SGD updates its parameters"
    with pytest.warns(MPCompileWarning, match=words):
        optimizer.step()
    assert not low_nodes(model)
    assert not same(before, snapshot([model]))
    assert finite(model)
