"""The first steps, in which the loss scale is found: none is skipped, and gradients are right."""

import copy
import logging
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_of import module_of
from overflowing import FP16, OVERFLOW, assert_unchanged, mlp, parameters
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpcompile import (
    LossScale,
    MPCompileError,
    MPCompileWarning,
    MPOptimizer,
    loss_scale_of,
    mpcompile,
)
from mpcompile.ir.fakes import duplicate
from mpcompile.scaling.fit_scale import FACTOR, check_two_scales


@pytest.mark.parametrize(("level", "emit"), [("O1", "eager"), ("O2", "aot_eager")])
def test_the_first_gradient_is_right(level: str, emit: str) -> None:
    """A gradient of 1 times 65536 is already beyond FP16. Buffers and dropout as in one forward."""
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 4)
    )
    reference = copy.deepcopy(model)
    compiled = mpcompile(model, dtype=torch.float16, level=level, emit=emit, strict=True)
    x = torch.randn(32, 8)
    for network in (reference, compiled):
        torch.manual_seed(1)
        network(x).sum().backward()
    size = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])  # type: ignore[misc]
    for wanted, actual in zip(reference.parameters(), model.parameters(), strict=True):
        assert (wanted.grad - actual.grad).norm() < 1e-2 * size
    for wanted, actual in zip(reference.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-2, atol=1e-3)
    assert loss_scale_of(compiled).skipped_steps == 0
    assert loss_scale_of(compiled).value < 2.0**16


def test_a_graph_in_fp32_finds_no_start() -> None:
    """Its gradients fit at any scale; those of the next graph don't."""
    by, x = nn.Parameter(torch.ones(8)), torch.randn(32, 8)
    net = module_of(lambda m, late: m.fc(x * m.by) if late else x * m.by, fc=nn.Linear(8, 4), by=by)
    model = mpcompile(net, **FP16)
    for late in (False, True):
        model(late).sum().backward()
    torch.testing.assert_close(net.fc.weight.grad, x.sum(0).expand(4, 8), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_no_first_step_is_skipped(level: str, fast: bool) -> None:
    """And the trajectory is FP32's: whoever compares twenty steps sees the same numbers."""
    model = mlp(32)
    reference = copy.deepcopy(model)
    compiled = mpcompile(model, level=level, **FP16)
    x, y = torch.randn(64, 8), torch.randint(4, (64,))
    losses: list[list[float]] = []
    for network in (reference, compiled):
        optimizer: torch.optim.Optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        if fast and network is compiled:
            optimizer = MPOptimizer(optimizer, emit="eager")
        losses.append([])
        for _ in range(20):
            # A sum: gradients 64 times those of the mean, which 2**16 does not fit.
            loss = F.cross_entropy(network(x), y, reduction="sum")
            optimizer.zero_grad()
            (loss / 4).backward()
            optimizer.step()
            losses[-1].append(loss.item() / 64)
    assert loss_scale_of(compiled).skipped_steps == 0
    torch.testing.assert_close(
        torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=0.03, atol=0.03
    )


@pytest.mark.filterwarnings("ignore:4 optimizer steps in a row")
def test_grad_scalers_start_is_there_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """And a skip is said: one line, and the count in the repr."""
    model = mpcompile(mlp(), loss_scale="grad_scaler", **FP16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    assert loss_scale_of(model).value == 2.0**16
    with caplog.at_level(logging.WARNING, logger="mpcompile"):
        for steps in range(1, 7):
            optimizer.zero_grad()
            (model(torch.randn(4, 8)).sum() * 4).backward()
            optimizer.step()
            # Only a step that is taken shows that it was the scale.
            taken = loss_scale_of(model).skipped_steps < steps
            assert sum("skipped" in record.message for record in caplog.records) == taken
    assert 3 <= loss_scale_of(model).skipped_steps < 6


def test_a_training_that_fits_at_a_scale_below_one() -> None:
    model = mpcompile(mlp(), **FP16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    (model(torch.ones(64, 8)) * 1e4).sum().backward()
    optimizer.step()
    assert loss_scale_of(model).value < 1
    assert loss_scale_of(model).skipped_steps == 0


def test_a_weight_written_before_a_backward_that_does_not_read_it() -> None:
    model = mlp()
    nets = mpcompile(copy.deepcopy(model), **FP16), model
    for net in nets:
        loss = net(torch.ones(4, 8)).mean() * 0.01
        with torch.no_grad():
            net[0].weight.zero_()
        loss.backward()
    found, wanted = (net[0].weight.grad for net in nets)
    assert 0 < (found - wanted).norm() < 0.01 * wanted.norm()


def test_a_model_that_fits_at_no_scale_stops_to_search() -> None:
    """A search runs a backward some thirty times."""
    model = mpcompile(nn.Linear(4, 4), dtype=torch.float16, emit="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> bool:
        model(torch.ones(2, 4)).sum().mul(float("inf")).backward()
        goes_on = loss_scale_of(model).search.goes_on
        optimizer.step()
        optimizer.zero_grad()
        return goes_on

    assert [step() for _ in range(3)] == [True] * 3
    with pytest.warns(MPCompileWarning, match="4 optimizer steps in a row"):
        assert not step()
    assert not step()
    assert loss_scale_of(model).value < 2.0**16


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("factor", [0.0, OVERFLOW, math.inf, math.nan])
def test_a_first_batch_without_a_usable_gradient_finds_nothing(
    factor: float, level: str, whole: bool
) -> None:
    """The next one does: its own gradients would overflow at 2**16."""
    model, scale = mlp(), LossScale.dynamic()
    before = parameters(model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    if level == "O2":
        optimizer = MPOptimizer(optimizer, emit="eager")
    options = {**FP16, "level": level, "loss_scale": scale}
    call = model if whole else mpcompile(model, **options)

    def step(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = call(x).sum() * factor
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = mpcompile(step, **options) if whole else step
    run(torch.ones(4, 8), torch.tensor(factor))
    assert scale.fitting
    assert_unchanged(before, model)
    run(torch.ones(4, 8), torch.tensor(2.0**8))
    assert not (scale.fitting and scale.search.goes_on)
    assert scale.value < 2.0**10
    assert scale.skipped_steps == (factor != 0)
    assert not torch.equal(before[0], next(model.parameters()))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_lbfgs_trains(level: str) -> None:
    """Its first closure finds the start. Later its overflows are skipped by the rule."""
    model = mpcompile(nn.Linear(8, 1), level=level, **FP16)
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=6)
    factor, losses = 1e3, []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) * factor
        loss.backward()
        losses.append(float(loss.detach()))
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    assert loss_scale_of(model).skipped_steps == 0
    assert not loss_scale_of(model).fitting
    before, factor = parameters(model), OVERFLOW
    optimizer.step(closure)  # type: ignore[arg-type]
    assert_unchanged(before, model)
    assert loss_scale_of(model).skipped_steps > 0
    factor = 1e3
    for _ in range(3):
        optimizer.step(closure)  # type: ignore[arg-type]
    a = torch.cat([x, torch.ones(32, 1)], 1)
    best = F.mse_loss(a @ torch.linalg.lstsq(a, y).solution, y) * factor
    assert losses[-1] == pytest.approx(float(best), rel=0.02)


def test_a_model_whose_every_training_forward_is_a_checkpoints() -> None:
    """Reentrant: the forward that counts is the one in the backward."""
    plain, model = nn.Linear(8, 8), mpcompile(mlp(), **FP16)
    optimizer = torch.optim.SGD([*plain.parameters(), *model.parameters()], lr=0.1)
    x = torch.randn(4, 8)
    values = []
    for factor in (1.0, 1.0, OVERFLOW, 1.0):
        optimizer.zero_grad()
        out = checkpoint(model, plain(x), use_reentrant=True)
        before = parameters(plain, model)
        (out.square().mean() * factor).backward()
        optimizer.step()
        values.append(loss_scale_of(model).value)
        if factor == OVERFLOW:
            assert_unchanged(before, plain, model)
        else:
            assert not torch.equal(before[0], plain.weight)
    assert values == [values[0], values[0], values[0] / 2, values[0] / 2]
    assert not loss_scale_of(model).fitting


class Written(nn.Module):
    """Two graphs: one writes to its input, so its backward can't be run again; the other searches.

    The gradients of `large` overflow at 2**16, those of the layer at which the other graph ends
    don't.
    """

    def __init__(self, writes_first: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.large = self.second if writes_first else self.first
        with torch.no_grad():
            self.large.weight.mul_(2.0**-10)
        self.writes_first = writes_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 1.0 if self.writes_first else self.first(x * 500.0)
        torch._dynamo.graph_break()
        h.mul_(2.0)
        y = self.first(h) if self.writes_first else self.second(h)
        torch._dynamo.graph_break()
        return self.second(y * 500.0) if self.writes_first else y


@pytest.mark.parametrize("emit", ["eager", "aot_eager"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("writes_first", [False, True])
def test_a_search_leaves_the_scale_of_graphs_that_cannot_search(
    writes_first: bool, level: str, emit: str
) -> None:
    model = Written(writes_first)
    reference = copy.deepcopy(model).double()
    start = parameters(model)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = MPOptimizer(sgd, emit="eager") if level == "O2" else sgd
    mpcompile(model, dtype=torch.float16, level=level, emit=emit, strict=True)
    x = torch.randn(4, 8)
    (model(x).sum() * 0.01).backward()
    (reference(x.double()).sum() * 0.01).backward()
    optimizer.step()
    scale = loss_scale_of(model)
    assert scale.value < 2.0**16  # the search has found another number than the other graph used
    assert scale.skipped_steps == 0
    for before, p, q in zip(start, model.parameters(), reference.parameters(), strict=True):
        moved = (before - p).double()
        assert (moved - q.grad).norm() <= 5e-3 * q.grad.norm()


@pytest.mark.slow("trainings that overflow, against FP64")
@pytest.mark.usefixtures("own_inductor_cache")
def test_a_search_for_the_scale_repeats_the_call_with_a_slice() -> None:
    """Inductor's graph asserts the strides of its inputs: a copy without the gaps fails."""

    class Words(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Embedding(16, 8), nn.Linear(8, 16))

    tokens = torch.randint(16, (4, 9))
    gradients = []
    for low in (False, True):
        torch.manual_seed(0)
        model = mpcompile(Words(), **{**FP16, "emit": "inductor"}) if low else Words()
        logits = model(tokens[:, :-1])
        # gradients of up to 2000 / 32 overflow at a scale of 65,536
        (2000 * F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert loss_scale_of(model).value < 2**16
    torch.testing.assert_close(gradients[1], gradients[0], rtol=2e-2, atol=0.5)


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(4, 9)[:, 1:],
        torch.randn(4, 1, 5).expand(4, 3, 5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(8, 8)[::2, ::3].t(),
        torch.randn(3, 9)[:0, 1:],
        torch.tensor(2.0),
    ],
    ids=lambda value: f"{tuple(value.shape)} {value.stride()}",
)
def test_a_duplicate_has_the_strides_of_its_tensor(value: torch.Tensor) -> None:
    found = duplicate(value)
    assert found.stride() == value.stride() or not value.numel()
    assert torch.equal(found, value)
    assert found.data_ptr() != value.data_ptr() or not value.numel()


GRADIENTS = {
    "real": torch.tensor([1.0, -2.0]),
    "imaginary": torch.tensor([1j, -2j]),
    "conjugate": torch.tensor([1j, 2 + 1j]).conj(),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_a_gradient_that_follows_the_scale(kind: str) -> None:
    gradient = GRADIENTS[kind]
    check_two_scales([gradient], [gradient], ())
    check_two_scales([gradient * FACTOR], [gradient], (0,))  # it is to leave scaled
    for higher, lower in ((gradient * FACTOR, gradient), (gradient, gradient * FACTOR)):
        with pytest.raises(MPCompileError, match="depends on the loss scale"):
            check_two_scales([higher], [lower], ())
