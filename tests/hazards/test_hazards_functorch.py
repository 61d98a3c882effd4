"""functorch's transforms inside a model: gradients at their true size, against FP64.

Dynamo's note of what autograd tracks is, inside a transform, that of the transform's own level.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS
from module_of import module_of
from torch import nn
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

from mpcompile import MPCompileError, MPOptimizer, mpcompile, train_step
from mpcompile.capture import compile_log
from mpcompile.compiler import graph_call
from mpcompile.ir import spec, units
from mpcompile.scaling import fit_scale

Transformed = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

WIDTH = 16


def rows(w: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.tanh(F.linear(x, w))


def energy(w: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.tanh(F.linear(x, w)).square().sum()


def written_in_place(w: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def row(x: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(WIDTH)
        out[:8] = F.linear(x, w)[:8].tanh()
        out[8:] += x[8:]
        return out.mul_(2)

    return row


def _jvp(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out, tangent = jvp(rows(w), (x,), (torch.ones_like(x),))
    return out + tangent


def _vjp(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out, pull = vjp(rows(w), x)
    pulled: torch.Tensor = pull(out)[0]
    return pulled + out


def _with_value(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    gradient, value = grad_and_value(energy(w))(x)
    return gradient + value


def _with_results_besides(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def loss(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.linear(z, w)
        return h.tanh().sum(), h

    gradient, h = grad(loss, has_aux=True)(x)
    return gradient + h


def _several_results(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out, sums = vmap(lambda row: (F.linear(row, w), row.sum()))(x)
    return out * sums[:, None]


def _without_gradient(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        known = vmap(rows(w))(x)
    return known * F.linear(x, w)


TRANSFORMS: dict[str, Transformed] = {
    "vmap": lambda x, w: vmap(rows(w))(x),
    "vmap of columns": lambda x, w: vmap(rows(w), in_dims=1, out_dims=1)(x),
    "vmap of vmap": lambda x, w: vmap(vmap(lambda number: number.tanh() * w.sum()))(x),
    "vmap of weights": lambda x, w: vmap(lambda s: F.linear(x, w * s).sum(0))(x[:, 0]),
    "vmap in place": lambda x, w: vmap(written_in_place(w))(x),
    "vmap of a detached row": lambda x, w: vmap(lambda row: F.linear(row.detach(), w))(x),
    "vmap of an integer": lambda x, w: vmap(lambda row: F.linear(row, w) * row.argmax())(x),
    "vmap, two results": _several_results,
    "vmap without a gradient": _without_gradient,
    "jvp": _jvp,
    "vjp": _vjp,
    "jacrev": lambda x, w: jacrev(rows(w))(x[0]),
    "jacfwd": lambda x, w: jacfwd(rows(w))(x[0]),
    "hessian": lambda x, w: hessian(energy(w))(x[0]),
    "grad": lambda x, w: grad(energy(w))(x),
    "grad and value": _with_value,
    "grad, results besides": _with_results_besides,
    "grad of vmap": lambda x, w: grad(lambda z: vmap(rows(w))(z).square().sum())(x),
    "vmap of grad": lambda x, w: vmap(grad(energy(w)))(x),
}


def _branches(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """No transform: a call that stays opaque."""
    return torch.cond(x.sum() > 1e6, lambda a: a * 2, lambda a: F.linear(a, w).tanh(), (x,))


class Places(nn.Module):
    """A transform first, in the middle, last and alone, each with weights of its own."""

    def __init__(self, transform: Transformed) -> None:
        super().__init__()
        self.transform = transform
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w = list(self.weights)
        first = F.linear(self.transform(x, w[0]), w[1])
        middle = F.linear(self.transform(F.linear(x, w[2]), w[3]), w[4])
        last = self.transform(F.linear(x, w[5]), w[6])
        return first, middle, last, self.transform(x, w[7])


def alone(transform: Transformed) -> nn.Module:
    """Nothing but the transform."""
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
    return module_of(lambda m, x: (transform(x, m.weight),), weight=weight)


def loss_of(outs: tuple[torch.Tensor, ...], target: torch.Tensor | None = None) -> torch.Tensor:
    return sum((out.square().mean() for out in outs), torch.zeros((), dtype=outs[0].dtype))


def compare_gradients(model: nn.Module, level: str, emit: str) -> None:
    """With those of the model in FP64, each to a few roundings of FP16."""
    x, exact = torch.randn(WIDTH, WIDTH), copy.deepcopy(model).double()
    loss_of(exact(x.double())).backward()
    mpcompile(model, dtype=torch.float16, level=level, emit=emit, strict=True)
    loss_of(model(x)).backward()
    for got, wanted in zip(model.parameters(), exact.parameters(), strict=True):
        assert (got.grad is None) == (wanted.grad is None)
        if got.grad is not None and wanted.grad is not None:  # not after a detach()
            off = (got.grad - wanted.grad).norm() / wanted.grad.norm()
            assert off < 5e-3, f"{off:.2g}"


@pytest.mark.slow_rows("derivatives inside of graphs, in each place")
@pytest.mark.sampled(3)
@LEVELS
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_in_each_place(transform: Transformed, level: str) -> None:
    compare_gradients(Places(transform), level, "eager" if level == "O1" else "aot_eager")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_alone(transform: Transformed) -> None:
    compare_gradients(alone(transform), "O2", "aot_eager")


@pytest.mark.slow("derivatives inside of graphs, in each place")
@pytest.mark.parametrize("name", ["vmap", "jvp"])
def test_under_inductor(name: str) -> None:
    """Forward mode, too, whose zeros Inductor doesn't take (`passes/joint/lowered_faults.py`)."""
    compare_gradients(alone(TRANSFORMS[name]), "O2", "inductor")


@pytest.mark.slow("derivatives inside of graphs, in each place")
@pytest.mark.parametrize("name", ["vmap", "jvp", "hessian", "vmap of grad"])
@LEVELS
def test_in_a_whole_step(name: str, level: str) -> None:
    model = Places(TRANSFORMS[name])
    exact, before, x = copy.deepcopy(model).double(), copy.deepcopy(model), torch.randn(16, 16)
    loss_of(exact(x.double())).backward()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if level == "O2":
        optimizer = MPOptimizer(optimizer)
    options = {"dtype": torch.float16, "level": level, "emit": "aot_eager", "strict": True}
    step = train_step(model, optimizer, loss_of, **options)
    step(x, torch.zeros(()))
    triples = zip(model.parameters(), before.parameters(), exact.parameters(), strict=True)
    for now, then, wanted in triples:
        off = (then - now - wanted.grad).norm() / wanted.grad.norm()
        assert off < 5e-3, f"{off:.2g}"


def test_products_that_stay_in_fp32_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    compile_log._say_products_stay.cache_clear()
    for _ in range(2):
        model = mpcompile(alone(_branches), dtype=torch.float16, emit="eager")
        model(torch.randn(WIDTH, WIDTH))
    (line,) = [r.getMessage() for r in caplog.records if r.name == "mpcompile"]
    assert "mpcompile: 1 matrix product stays in FP32 inside of calls" in line
    assert ": test_hazards_functorch.py:" in line


# -- the two checks that do not read what the proof reads -----------------------------------------


def with_a_fault(monkeypatch: pytest.MonkeyPatch, *unasked: Callable[..., Any]) -> nn.Module:
    """A model whose branches the proof takes for constants, and no check that finds it."""
    without = {spec._tracked_as_captured, *unasked}
    others = tuple(promise for promise in spec.PROMISES if promise.check not in without)
    monkeypatch.setattr(spec, "PROMISES", others)
    monkeypatch.setattr(units.History, "_differentiable", lambda self: lambda i: False)
    return mpcompile(Places(_branches), dtype=torch.float16, emit="aot_eager")


def test_autograd_is_asked_in_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_a_fault(monkeypatch)
    with pytest.raises(MPCompileError, match=r"autograd tracks result 2, 3 of a compiled graph"):
        model(torch.randn(WIDTH, WIDTH))


@pytest.mark.slow("derivatives inside of graphs, in each place")
def test_a_gradient_that_follows_the_scale_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first backward asks numbers, even where nothing else does."""
    model = with_a_fault(monkeypatch, units.complaints)
    monkeypatch.setattr(graph_call, "check_constants", lambda results, constant: None)
    monkeypatch.setattr(units.History, "reached", lambda self: set(self.inputs))
    outs = model(torch.randn(WIDTH, WIDTH))
    with pytest.raises(MPCompileError, match="depends on the loss scale"):
        loss_of(outs).backward()


def test_what_is_compared_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(fit_scale, "check_two_scales", lambda *args: calls.append(args))
    model = mpcompile(nn.Linear(4, 4), dtype=torch.float16, emit="eager")
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
    assert len(calls) == 1
