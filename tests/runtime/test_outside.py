"""Products outside of compiled graphs: what is compiled by itself, what is left, what is said."""

import copy
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_of import function_of
from public_runs import products
from torch import Tensor, nn

from mpcompile import (
    MPCompileError,
    MPCompileWarning,
    MPOptimizer,
    compiled_plans,
    explain,
    mpcompile,
)  # fmt: skip
from mpcompile.planner.plan_data import OutsideLine
from mpcompile.plans.model_plan import Plan
from mpcompile.scaling.copies import copies_of

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


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


class ByHand(nn.Module):
    """The products are in the frame itself that is left to Python: nothing can compile them."""

    def __init__(self) -> None:
        super().__init__()
        self.once = Once()
        self.weights = nn.ParameterList([torch.randn(16, 16) / 4 for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = self.once(x @ weight)
        return x


class After(nn.Module):
    """A head that is compiled, and a loop that is not."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.head, self.loop = nn.Linear(16, features, bias=False), ByHand()

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
        return self.b(y.relu())


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


class Deep(nn.Module):
    """The loop is two modules down; around it are layers that Dynamo compiles by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.inner = nn.Sequential(nn.ReLU(), nn.Sequential(Loop(), nn.ReLU()))
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


@pytest.mark.slow("compiles several models")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make", [Loop, Deep, lambda: nn.Sequential(Loop(), Loop())])
def test_layers_of_a_loop_are_compiled_each_by_itself(
    make: Callable[[], nn.Module], level: str
) -> None:
    net = make()
    exact = copy.deepcopy(net).double()
    assert said(net, calls=5, level=level) == []
    net.zero_grad()
    layers = sum(isinstance(m, nn.Linear) for m in net.modules())
    found: list[Tensor] = []
    assert products(lambda: found.append(net(X))) == ["addmm low"] * layers
    found[0].sum().backward()
    exact(X.double()).sum().backward()
    for got, wanted in zip(net.parameters(), exact.parameters(), strict=True):
        assert got.grad is not None
        assert wanted.grad is not None
        assert_near(got.grad, wanted.grad)


def assert_near(got: Tensor, wanted: Tensor) -> None:
    assert float((got - wanted).norm()) < 4e-3 * float(wanted.norm())


@pytest.mark.slow("compiles several models")
def test_an_optimizer_that_takes_over_parameters_compiles_them_again() -> None:
    net = Loop()
    assert said(net, level="O2") == []
    optimizer = MPOptimizer(torch.optim.SGD(net.parameters(), lr=1e-2), emit="eager")
    optimizer.zero_grad()
    net(X).sum().backward()
    weight = net.layers[0].weight
    assert weight.grad is not None
    assert copies_of(weight)  # the graph has read one, in the low dtype
    before = weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, weight)


def test_a_function_that_calls_modules_in_a_loop() -> None:
    layers = [nn.Linear(16, 16), nn.Linear(16, 16)]

    def forward(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x

    compiled = mpcompile(forward, dtype=torch.float16, emit="aot_eager")
    for _ in range(3):  # a warning would be an error here
        compiled(X)
    assert products(lambda: compiled(X)) == ["addmm low"] * 2


@pytest.mark.slow("compiles several models")
def test_a_step_in_pieces_that_calls_modules_in_a_loop() -> None:
    net, plain = Loop(), Loop()
    plain.load_state_dict(net.state_dict())
    optimizers = {n: torch.optim.SGD(n.parameters(), lr=1e-2) for n in (net, plain)}

    def step(net: nn.Module, x: Tensor) -> None:
        optimizers[net].zero_grad()
        net(x).square().mean().backward()
        optimizers[net].step()

    compiled = mpcompile(step, dtype=torch.float16, emit="aot_eager")
    for i in range(5):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", MPCompileWarning)
            low = products(lambda: compiled(net, X))
        step(plain, X)
        assert ["runs in pieces" in str(w.message) for w in caught] == [True] * (i == 0)
    assert sorted(low) == ["addmm low"] * 2 + ["mm low"] * 3
    for got, wanted in zip(net.parameters(), plain.parameters(), strict=True):
        assert_near(got.detach(), wanted.detach().double())


def test_the_products_of_an_optimizer_do_not_count() -> None:
    """They make an update, which is not rounded."""
    net = nn.Linear(16, 16, bias=False)

    class Turned(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for p in net.parameters():
                with torch.no_grad():
                    p -= 1e-2 * torch.eye(16) @ p.grad

    optimizer = Turned(net.parameters(), lr=1e-2)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        net(x).sum().backward()
        torch._dynamo.graph_break()
        optimizer.step()

    compiled = mpcompile(step, dtype=torch.float16, emit="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MPCompileWarning)
        for _ in range(3):
            compiled(X)
    assert not any("FLOPs" in str(w.message) for w in caught)


@pytest.mark.parametrize("emit", ["eager", "aot_eager"])
def test_a_break_in_a_loop_is_said_once(emit: str) -> None:
    (message,) = said(ByHand(), emit=emit)
    assert "0% of the product FLOPs of ByHand ran in compiled graphs; " in message
    assert "ByHand ran as torch runs them, in FP32" in message
    assert "forward (test_outside.py:" in message
    assert "Data-dependent branching" in message
    assert ", in a loop" in message


@pytest.mark.slow("compiles several models")
def test_the_share_counts_each_run_of_a_graph() -> None:
    """A head has as many FLOPs as the two layers of a loop; the loop over the parts breaks, too."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([After(32), After(32)])

        def forward(self, x: Tensor) -> Tensor:
            return sum((part(x) for part in self.parts), torch.zeros(()))

    (message,) = said(Parts())
    assert "50% of the product FLOPs of Parts" in message
    assert all(f"parts.{i}.loop" in message for i in (0, 1))


@pytest.mark.slow("compiles several models")
@pytest.mark.parametrize("emit", ["eager", "aot_eager"])
@pytest.mark.parametrize("net", [Straight(), nn.Sequential(nn.Linear(16, 16), nn.ReLU())], ids=type)
def test_nothing_is_said_where_all_is_compiled(net: nn.Module, emit: str) -> None:
    assert said(net, emit=emit) == []
    assert compiled_plans(net)


@pytest.mark.slow("compiles several models")
def test_nothing_is_said_of_a_hundredth() -> None:
    assert said(After(32 * 128)) == []


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
    with pytest.raises(MPCompileError, match=r"ByHand ran as torch runs them"):
        said(ByHand(), strict=True)


@pytest.mark.slow("compiles several models")
def test_later_calls_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Loop()
    said(net, calls=4)
    monkeypatch.setattr("mpcompile.runtime.left_to_python.Outside", None)  # fails if it is called
    with torch.no_grad():
        net(X)
    net(X).sum().backward()


# Only its backward is a product.
Mixed = function_of(lambda ctx, x: x * 2, lambda ctx, grad: grad @ torch.eye(16))


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
            return self.a(x) + self.slope(x)

    assert said(Penalty()) == []


class Printing(nn.Module):
    """Breaks in loops that don't depend on values, around layers and around products."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 16, bias=False)
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.matrix = nn.Parameter(torch.eye(16))

    def several(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) @ self.matrix
            torch._dynamo.graph_break()
        return x

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x)
        torch._dynamo.graph_break()
        return self.several(x) + y


def test_explain_counts_it() -> None:
    plan = explain(Printing(), X, dtype="float16")
    flops = 2 * 4 * 16 * 16  # of each of the five products
    assert plan.outside == (OutsideLine("", 2 * flops),)
    assert plan.share_in_graphs == pytest.approx(3 / 5)
    assert "outside of the graphs, in FP32: Printing (40.0% of the product FLOPs)" in str(plan)
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert (again.outside, again.share_in_graphs) == (plan.outside, plan.share_in_graphs)


@pytest.mark.slow("compiles several models")
def test_explain_compiles_the_layers_of_a_loop_as_training_does() -> None:
    net = mpcompile(Printing(), dtype=torch.float16, emit="eager")
    plan = explain(net, X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MPCompileWarning)
        for _ in range(3):
            net(X)
    low = [
        [node.module for graph in graphs for node in graph.nodes if node.precision == "LOW"]
        for graphs in (plan.graphs, compiled_plans(net))
    ]
    assert low[0] == low[1] == ["head", "layers.0", "layers.1"]


def test_explain_of_what_is_compiled() -> None:
    plan = explain(Straight(), X, dtype="float16")
    assert (plan.outside, plan.share_in_graphs) == ((), 1.0)


class Scores(nn.Module):
    """No parameters: nothing else would notice that no graph holds its product."""

    def forward(self, x: Tensor) -> Tensor:
        for row in range(2):
            torch._dynamo.graph_break()
            x = x @ x.T if row else x
        return x * x.requires_grad_()[0]


def test_a_module_without_parameters() -> None:
    (message,) = said(Scores(), x=torch.randn(4, 4))
    assert "0% of the product FLOPs of Scores ran in compiled graphs; Scores ran" in message
