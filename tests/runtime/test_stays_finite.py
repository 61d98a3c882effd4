"""A loss or gradients that stop being finite where no loss scale counts it: said once, soon."""

import gc
import math
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_of import module_of
from torch import nn

from mpcompile import MPCompileWarning, MPOptimizer, mpcompile, train_step
from mpcompile.scaling import stays_finite

BF16: dict[str, Any] = {"dtype": torch.bfloat16, "emit": "aot_eager"}
WITHIN = 2  # steps


@pytest.fixture(autouse=True)
def from_nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was said before; and each call is looked at, however long it takes."""
    monkeypatch.setattr(stays_finite.FiniteCheck, "warnings", 0)
    monkeypatch.setattr(stays_finite, "PAUSE", 0)


class Said:
    """The warnings of a training, with the steps in which they came."""

    def __init__(self) -> None:
        self.step, self.texts = 0, list[tuple[int, str]]()

    def run(self, step: Callable[[int], object], steps: int) -> "Said":
        for number in range(1, steps + 1):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step(number)
            for warning in caught:
                assert issubclass(warning.category, MPCompileWarning), warning
                self.texts.append((number, str(warning.message)))
        return self

    def once(self, *, until: int) -> str:
        """The one text, which must have come by that step."""
        assert len(self.texts) == 1, self.texts
        ((step, text),) = self.texts
        assert step <= until, text
        assert "mpcompile.diagnose(" in text
        return text


def log_loss() -> Any:
    """Two layers, and the loss, which is the logarithm of a mean."""
    return module_of(
        lambda m, x: m.last(torch.relu(m.first(x))).square().mean().log(),
        first=nn.Linear(8, 16), last=nn.Linear(16, 4),
    )  # fmt: skip


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def training(model: Any, optimizer: Any, *, bad_from: int) -> Callable[[int], None]:
    """Steps of a model whose loss is outside; inputs hold NaN from that step on."""

    def step(number: int) -> None:
        x = torch.randn(4, 8)
        if number >= bad_from:
            x[0, 0] = math.nan
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("bad_from", [1, 2, 7, 40])
def test_gradients_that_stop_being_finite_are_said(level: str, bad_from: int) -> None:
    model = mpcompile(mlp(), level=level, **BF16)
    step = training(model, sgd(model), bad_from=bad_from)
    text = Said().run(step, 60).once(until=bad_from + WITHIN)
    assert "since SGD's step " in text
    assert "gradients of all parameters are not finite: the weights become NaN" in text


def test_the_warning_points_at_the_step() -> None:
    model = mpcompile(mlp(), **BF16)
    step = training(model, sgd(model), bad_from=1)
    step(1)
    with pytest.warns(MPCompileWarning, match="not finite") as caught:
        step(2)
    assert caught[0].filename == __file__


def test_a_loss_that_a_model_returns() -> None:
    """No optimizer steps, so nothing else sees it."""
    model = mpcompile(log_loss(), **BF16)
    said = Said().run(lambda n: model(torch.randn(4, 8) * (math.nan if n > 5 else 1)), 20)
    text = "since training call 6 (5 was still finite), a loss that is returned is nan"
    assert text in said.once(until=7)


def test_a_handwritten_update_leaves_nan_in_weights() -> None:
    """The loss is outside, and no torch optimizer steps: the weights tell."""
    model = mpcompile(mlp(), **BF16)

    def step(number: int) -> None:
        (model(torch.randn(4, 8)).square().mean() * (math.nan if number > 2 else 1)).backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
                param.grad = None

    assert re.search(r"since training call .*, [\w.]+ is NaN", Said().run(step, 40).once(until=8))


class Sqrt(nn.Module):
    """The gradient of a square root at zero is infinite, and times zero NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.side = mlp(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        side = (self.side(x).square() * bad).sqrt()
        return (self.body(x).square().mean() + side.sum() * 0).float()


@pytest.mark.parametrize("wraps", [False, True])
def test_a_finite_loss_with_a_nan_gradient(wraps: bool) -> None:
    """Of one parameter, which is named. An MPOptimizer skips such steps, so the loss stays finite
    and the weights as they are.
    """
    model = mpcompile(Sqrt(), **BF16)
    optimizer = MPOptimizer(sgd(model), emit="aot_eager") if wraps else sgd(model)
    losses: list[float] = []

    def step(number: int) -> None:
        loss = model(torch.randn(4, 8), torch.tensor(0.0 if number >= 10 else 1.0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    text = Said().run(step, 40).once(until=10 + 3)
    if wraps:
        assert all(map(math.isfinite, losses))
        assert "the gradient of side.weight, side.bias is not finite: each step is skipped" in text
    else:
        assert math.isfinite(losses[9])
        assert math.isnan(losses[10])


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("wraps", [False, True])
def test_a_whole_step(level: str, wraps: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = MPOptimizer(sgd(model)) if wraps else sgd(model)
    step = train_step(model, optimizer, F.mse_loss, level=level, **BF16)
    y = torch.randn(4, 4)

    def one(number: int) -> None:
        step(torch.randn(4, 8) * (math.nan if number > 5 else 1), y)

    text = Said().run(one, 30).once(until=5 + WITHIN)
    assert re.search("since training step . .*a loss that is returned is nan", text)


def test_a_whole_step_that_is_skipped_each_time() -> None:
    """The loss stays finite, since an MPOptimizer leaves the weights alone."""
    model, bad = Sqrt(), torch.zeros(())
    step = train_step(model, MPOptimizer(sgd(model)), lambda loss, _: loss, **BF16)
    said = Said().run(lambda _: step(torch.randn(4, 8), bad, torch.zeros(4)), 10)
    assert "gradients are not finite, and MPOptimizer skips each step" in said.once(until=WITHIN)


# -- nothing is said -------------------------------------------------------------------------------


def silent(step: Callable[[int], object], steps: int = 40) -> None:
    assert Said().run(step, steps).texts == []


def test_an_evaluation() -> None:
    model = mpcompile(log_loss(), **BF16)

    def step(number: int) -> None:
        with torch.no_grad():
            assert model(torch.zeros(4, 8) * math.nan).isnan()

    silent(step)


def test_masked_outputs() -> None:
    """Attention and logits are masked by minus infinity, in results and within."""

    def forward(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = m.body(x) + torch.tensor([0.0, 0.0, -math.inf, -math.inf])
        return scores, scores.softmax(-1)

    model = mpcompile(module_of(forward, body=mlp()), **BF16)
    optimizer = sgd(model)

    def step(number: int) -> None:
        scores, weights = model(torch.randn(4, 8))
        assert scores.isinf().any()
        (weights.square().sum() + scores[:, :2].square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    silent(step)


def test_one_bad_batch_that_is_skipped() -> None:
    """As a loss scale skips one now and then: no training stops being finite for that."""
    model = mpcompile(mlp(), **BF16)
    optimizer = MPOptimizer(sgd(model), emit="aot_eager")

    def step(number: int) -> None:
        x = torch.randn(4, 8) * (math.nan if number in (2, 8, 21) else 1)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    silent(step)


def test_what_is_not_ours() -> None:
    ours = mpcompile(mlp(), **BF16)
    ours(torch.randn(4, 8)).sum().backward()
    other = mlp()
    silent(training(other, sgd(other), bad_from=1))


def test_fp16_is_left_to_its_loss_scale(caplog: pytest.LogCaptureFixture) -> None:
    model = mpcompile(mlp(), dtype="fp16", emit="aot_eager", loss_scale=128.0)
    silent(training(model, sgd(model), bad_from=1), 3)


@pytest.mark.slow("compiles four graphs, and two of them again")
def test_graphs_of_a_model_speak_once() -> None:
    """Each returns a loss, and there are two optimizers; and it is compiled again."""

    def forward(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = m.first(x)
        torch._dynamo.graph_break()
        return first, m.last(x)

    model = mpcompile(module_of(forward, first=log_loss(), last=log_loss()), **BF16)
    optimizers = sgd(model.first), sgd(model.last)

    def step(number: int) -> None:
        rows = 4 if number < 30 else 5  # compiled again
        losses = model(torch.randn(rows, 8) * (math.nan if number > 6 else 1))
        torch.stack(losses).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    Said().run(step, 50).once(until=6 + WITHIN)


def test_another_training_is_told_again() -> None:
    for _ in range(2):
        model = mpcompile(mlp(), **BF16)
        Said().run(training(model, sgd(model), bad_from=3), 12).once(until=3 + WITHIN)


def test_nothing_is_kept_alive() -> None:
    model = mpcompile(mlp(), **BF16)
    optimizer = sgd(model)
    Said().run(training(model, optimizer, bad_from=3), 12).once(until=3 + WITHIN)
    gone = [weakref.ref(x) for x in (optimizer, model, *model.parameters())]
    del model, optimizer
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in gone if ref() is not None] == []


def test_looks_that_cost_much_get_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take no time at all are looked at when their number doubles."""
    monkeypatch.setattr(stays_finite, "PAUSE", 1e9)
    watch, looked = stays_finite.FiniteCheck("step", ()), []
    for number in range(1, 260):
        if watch.comes():
            looked.append(number)
            watch.see_call([torch.tensor(1.0)], ())
    assert looked == [1, 2, 4, 8, 16, 32, 64, 128, 256]


def test_nothing_waits_for_what_has_not_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: what is looked at in a call is read in a later one."""

    class Slow:
        """Arrives in the third call that asks."""

        def __init__(self, *values: torch.Tensor) -> None:
            self.values, self.asked = values, 0

        def read(self) -> tuple[float, ...] | None:
            self.asked += 1
            return tuple(v.item() for v in self.values) if self.asked == 3 else None

    monkeypatch.setattr(stays_finite, "AsyncRead", Slow)
    watch = stays_finite.FiniteCheck("training step", ())

    def step(number: int) -> None:
        if watch.comes():
            watch.see_call([torch.tensor(math.nan if number >= 5 else 1.0)], ())

    text = "since training step 5 (3 was still finite), a loss that is returned is nan"
    assert text in Said().run(step, 30).once(until=9)


def test_names_of_a_model_that_is_not_known() -> None:
    """`torch.compile` hands over a graph, not a model."""
    model = Sqrt()
    compiled = torch.compile(model, backend="mpcompile", options=BF16)
    optimizer = MPOptimizer(sgd(model), emit="aot_eager")

    def step(number: int) -> None:
        compiled(torch.randn(4, 8), torch.tensor(0.0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    text = Said().run(step, 4).once(until=2)
    assert "the gradient of a parameter of shape (1, 8), a parameter of shape (1,) is not" in text
