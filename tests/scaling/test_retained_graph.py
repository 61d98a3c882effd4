"""Several backwards over one forward, in the first step and later: as without a compiler."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_of import module_of
from torch import Tensor, nn

from mpcompile import MPCompileError, MPOptimizer, loss_scale_of, mpcompile

Way = Callable[[Any, nn.Module, Tensor, int], Any]

# One way takes gradients by hand, and leaves none to the optimizer.
pytestmark = pytest.mark.filterwarnings("ignore:.*changes nothing")


def recurrent() -> nn.Module:
    """Its graph is compiled in two pieces, with the recurrent layer between."""

    def forward(m: Any, x: Tensor) -> Any:
        hidden, _ = m.rnn(m.first(x).tanh()[None])
        return m.last(hidden[0].tanh())

    return module_of(forward, first=nn.Linear(8, 8), rnn=nn.LSTM(8, 8), last=nn.Linear(8, 4))


def sine() -> nn.Module:
    """Of the two that the backward of the sine reads, the gradient is the caller's, so its result
    takes the place of the other: of what the forward saved.
    """
    return module_of(lambda m, x: m.first(x).sin(), first=nn.Linear(8, 16))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def losses(y: Tensor) -> tuple[Tensor, ...]:
    return y.sum(), y.square().sum(), y.tanh().mean()


def several_backwards(call: Any, model: nn.Module, x: Tensor, step: int) -> Any:
    first, second, third = losses(call(x))
    first.backward(retain_graph=True)
    second.backward(retain_graph=True)
    third.backward()
    return [p.grad for p in model.parameters()]


def now_and_then(call: Any, model: nn.Module, x: Tensor, step: int) -> Any:
    """The first backward, by which the code is made, keeps no graph."""
    first, second, _ = losses(call(x))
    first.backward(retain_graph=step % 2 == 1)
    if step % 2 == 1:
        second.backward()
    return [p.grad for p in model.parameters()]


def gradients_of_each(call: Any, model: nn.Module, x: Tensor, step: int) -> Any:
    y = call(x)
    found = [
        torch.autograd.grad(one, [*model.parameters()], retain_graph=True) for one in losses(y)
    ]
    return [gradient for gradients in found for gradient in gradients]


WAYS = [several_backwards, now_and_then, gradients_of_each]


def check(make: Callable[[], nn.Module], way: Way, steps: int = 3, **options: Any) -> None:
    """FP16 has 11 bits: within 1% of FP64, measured by each gradient's largest element."""
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model).double()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if options["level"] == "O2":
        optimizer = MPOptimizer(optimizer, emit="eager")
    compiled = mpcompile(model, dtype=torch.float16, strict=True, **options)
    for step in range(steps):
        x = torch.randn(6, 8)
        optimizer.zero_grad()
        reference.zero_grad()
        found = way(compiled, model, x, step)
        wanted = way(reference, reference, x.double(), step)
        for mine, true in zip(found, wanted, strict=True):
            scale = loss_scale_of(model).value if mine.dtype is torch.float16 else 1.0
            error = (mine.double() / scale - true).abs().max()
            assert error <= 1e-2 * true.abs().max()
        optimizer.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("emit", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", WAYS)
def test_as_in_fp64(way: Way, emit: str, level: str) -> None:
    check(net, way, emit=emit, level=level)


@pytest.mark.slow_rows("trainings that overflow, against FP64")
@pytest.mark.parametrize("way", WAYS)
def test_a_graph_in_pieces(way: Way) -> None:
    check(recurrent, way, emit="aot_eager", level="O1")


@pytest.mark.slow("trainings that overflow, against FP64")
def test_inductors_code_may_write_to_what_is_saved() -> None:
    """And does, if the first backward keeps no graph. A cache may know other code."""
    with torch._functorch.config.patch(enable_autograd_cache=False):
        check(sine, now_and_then, emit="inductor", level="O1", steps=4)


@pytest.mark.parametrize("emit", ["eager", "aot_eager"])
def test_gradients_that_could_be_differentiated_raise_only_if_they_are(emit: str) -> None:
    """`create_graph=True` keeps the graph, too."""
    model = mpcompile(net(), dtype=torch.float16, emit=emit, strict=True)
    for _ in range(3):
        loss = model(torch.randn(6, 8)).sum()
        gradients = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
        assert all(gradient.isfinite().all() for gradient in gradients)
        if emit == "aot_eager":
            with pytest.raises(MPCompileError, match="double backward"):
                gradients[0].square().sum().backward()


def test_of_an_input_that_the_graph_has_written() -> None:
    """None of its results has a history; what the graph has made of the input has one."""

    def program(x: torch.Tensor) -> torch.Tensor:
        nn.functional.leaky_relu_(x)
        return (x * 4).round().long()

    fast = mpcompile(program, dtype=torch.float16, emit="aot_eager", loss_scale=1024.0)
    for keeps in (False, True):
        leaf = torch.linspace(-1, 1, 8, requires_grad=True)
        x = leaf * 1
        fast(x)
        x.sum().backward(retain_graph=keeps)
        if keeps:
            x.sum().backward()
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, (1 + keeps) * torch.where(leaf > 0, 1.0, 0.01))
