"""Products that run outside of the compiled graphs, in FP32: said once, counted by `explain`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpcompile import MPCompileError, MPCompileWarning, compiled_plans, mpcompile

X = torch.randn(4, 16)


class Once(nn.Module):
    """Does something at its first call, as a codebook that makes itself from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.done: Tensor
        self.register_buffer("done", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:
            self.done.fill_(True)
        return x * 2


class Loop(nn.Module):
    """The break is in a loop: Dynamo leaves the whole frame to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16), Once(), nn.Linear(16, 16)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Behind(nn.Module):
    """A head that is compiled, and a loop that is not."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.head, self.loop = nn.Linear(16, features, bias=False), Loop()

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x)
        torch._dynamo.graph_break()
        return self.loop(x).sum() + y.sum()


class Straight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) @ torch.eye(16)
        torch._dynamo.graph_break()
        out: Tensor = self.b(y.relu())
        return out


def said(net: nn.Module, calls: int = 3, x: Tensor = X, **options: Any) -> list[str]:
    """What is said of a model in evaluations and steps."""
    options = {"dtype": torch.float16, "emit": "aot_eager", **options}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mpcompile(net, **options)
        for _ in range(calls):
            with torch.no_grad():
                net(x)
            net(x).sum().backward()
    return [str(w.message) for w in caught if issubclass(w.category, MPCompileWarning)]


@pytest.mark.parametrize("emit", ["eager", "aot_eager"])
def test_a_break_in_a_loop_is_said_once(emit: str) -> None:
    (message,) = said(Loop(), emit=emit)
    assert "0% of the product FLOPs of Loop ran in compiled graphs; " in message
    assert "layers.0, layers.2 ran as torch runs them, in FP32" in message
    assert "forward (test_outside.py:" in message
    assert "Data-dependent branching" in message
    assert ", in a loop" in message


def test_the_share_counts_each_run_of_a_graph() -> None:
    """A head has as many FLOPs as the two layers of a loop; the loop over the parts breaks, too."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Behind(32), Behind(32)])

        def forward(self, x: Tensor) -> Tensor:
            return sum((part(x) for part in self.parts), torch.zeros(()))

    (message,) = said(Parts())
    assert "50% of the product FLOPs of Parts" in message
    names = [f"parts.{i}.loop.layers.{k}" for i in (0, 1) for k in (0, 2)]
    assert all(name in message for name in names)


@pytest.mark.parametrize("emit", ["eager", "aot_eager"])
@pytest.mark.parametrize("net", [Straight(), nn.Sequential(nn.Linear(16, 16), nn.ReLU())], ids=type)
def test_nothing_is_said_where_all_is_compiled(net: nn.Module, emit: str) -> None:
    assert said(net, emit=emit) == []
    assert compiled_plans(net)


def test_nothing_is_said_of_a_hundredth() -> None:
    assert said(Behind(32 * 128)) == []


def test_nothing_is_said_of_products_that_run_low() -> None:
    class Autocast(Straight):
        @torch.compiler.disable
        def aside(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                out: Tensor = self.b(x)
                return out.float()

        def forward(self, x: Tensor) -> Tensor:
            return self.aside(self.a(x))

    assert said(Autocast()) == []


def test_nothing_is_said_where_nothing_was_to_run_low() -> None:
    assert said(Loop(), level="O0") == []


def test_strict_raises() -> None:
    with pytest.raises(MPCompileError, match=r"layers.0, layers.2 ran as torch runs them"):
        said(Loop(), strict=True)


def test_later_calls_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Loop()
    said(net, calls=1)
    monkeypatch.setattr("mpcompile.calls.module_call.Outside", None)  # fails if it is called
    with torch.no_grad():
        net(X)
    net(X).sum().backward()


class Mixed(torch.autograd.Function):
    """Only its backward is a product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient @ torch.eye(16)


def test_a_backward_within_the_forward_does_not_count() -> None:
    class Penalty(Straight):
        @torch.compiler.disable
        def slope(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                mixed: Tensor = Mixed.apply(x)  # type: ignore[no-untyped-call]
                (found,) = torch.autograd.grad(mixed.sum(), x)
            return found

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.a(x) + self.slope(x)
            return out

    assert said(Penalty()) == []
