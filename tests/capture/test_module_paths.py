"""Module paths, also after a graph break in a submodule; and sizes that depend on values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import SETTINGS, check
from module_of import module_of
from torch import Tensor, nn

from mpcompile import Policy, compiled_plans, diagnose, explain, mpcompile
from mpcompile.compiler import graph_function
from mpcompile.torch_inside import tracing_settings

# -- module paths ----------------------------------------------------------------------------------


FP16 = {"dtype": torch.float16, "emit": "eager"}


class Broken(nn.Module):
    """Two layers with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(Broken())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))  # type: ignore[no-any-return]


def modules(model: nn.Module) -> dict[str, str]:
    return {
        node.module: node.precision
        for plan in compiled_plans(model)
        for node in plan.nodes
        if node.op == "aten::linear"
    }


@pytest.mark.parametrize("tied", [False, True])
def test_paths_are_complete(tied: bool) -> None:
    """The name of a tied weight is that of its first module; the other parameters tell."""
    model = Model()
    if tied:
        model.blocks[1][0].first.weight = model.blocks[0].weight
    mpcompile(model, **FP16)
    model(torch.randn(2, 4)).sum().backward()
    assert set(modules(model)) == {"blocks.0", "blocks.1.0.first", "blocks.1.0.second"}


@pytest.mark.parametrize("pinned", ["blocks.1.0.first", "blocks.1.0.second"])
def test_a_policy_finds_the_module(pinned: str) -> None:
    pattern = "^" + pinned.replace(".", r"\.") + "$"
    model = mpcompile(Model(), policy=Policy(modules={pattern: "fp32"}), **FP16)
    model(torch.randn(2, 4)).sum().backward()
    full = {path for path, precision in modules(model).items() if precision == "FULL"}
    assert full == {pinned}


@pytest.mark.parametrize("number", [0, 1])
def test_a_fault_is_in_the_module_that_was_called(number: int) -> None:
    """Both run the code that Dynamo compiled for the first."""
    model = nn.Sequential(Broken(), Broken())
    with torch.no_grad():
        model[1].first.weight.fill_(0.0)  # type: ignore[union-attr, operator]
    assert faulty_module(model, model[number]) == f"{number}.second"


def test_a_fault_has_its_whole_path() -> None:
    model = Model()
    assert faulty_module(model, model.blocks[1][0]) == "blocks.1.0.second"  # type: ignore[index]


def faulty_module(model: nn.Module, broken: Any) -> str:
    """The path that is told of a fault in this part."""
    with torch.no_grad():
        broken.second.weight.fill_(60000.0)
        broken.second.bias.fill_(60000.0)
        broken.first.bias.fill_(10.0)
    return diagnose(model, torch.ones(2, 4), dtype=torch.float16).first.node.module


# -- sizes that depend on values -------------------------------------------------------------------


class Mixture(nn.Module):
    """Experts in a loop, as Mixtral's eager experts."""

    def __init__(self, empty: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 3, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16)) for _ in range(3)
        )
        if empty:  # the inputs are positive
            nn.init.constant_(self.gate.weight[2].detach(), -4.0)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, 16)
        weights, chosen = torch.topk(F.softmax(self.gate(tokens), dim=1), 2, dim=-1)
        out, mask = torch.zeros_like(tokens), F.one_hot(chosen, 3).permute(2, 1, 0)
        for i, expert in enumerate(self.experts):
            place, token = torch.where(mask[i])
            found = expert(tokens[None, token].reshape(-1, 16)) * weights[token, place, None]
            out.index_add_(0, token, found)
        return out.view(x.shape)


@pytest.mark.slow_rows("compiles many graphs")
@SETTINGS
@pytest.mark.parametrize("empty", [False, True])
def test_experts_in_a_loop(level: str, emit: str, empty: bool) -> None:
    seen = check(Mixture(empty), torch.rand(2, 5, 16), level=level, emit=emit, steps=2)
    (plan,) = seen.plans
    assert [n.op for n in plan.nodes if n.precision == "LOW"].count("aten::linear") == 7


def program(kind: Callable[..., Tensor]) -> Any:
    return module_of(kind, first=nn.Linear(8, 8), last=nn.Linear(8, 8))


def masked_tokens(net: Any, x: Tensor) -> Tensor:
    keep = x[:, 0] > 0.3
    return F.cross_entropy(net.last(net.first(x)[keep]), torch.arange(6)[keep])


def selected(net: Any, x: Tensor) -> Tensor:
    return net.last(net.first(x).masked_select((x > -9).detach()).view(-1, 8))


def repeated(net: Any, x: Tensor) -> Tensor:
    return net.last(net.first(x).repeat_interleave(torch.arange(6) % 3, dim=0))


def returned(net: Any, x: Tensor) -> Tensor:
    return net.last(net.first(x))[x[:, 0] > 0.3]


PROGRAMS = [masked_tokens, selected, repeated, returned]


@pytest.mark.parametrize("kind", PROGRAMS, ids=lambda p: p.__name__)
def test_one_graph(kind: Callable[..., Tensor]) -> None:
    seen = check(program(kind), torch.rand(6, 8), emit="aot_eager", low=["linear"])
    assert len(seen.plans) == 1


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_broken_where_it_can_not_be_compiled(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor can't compile all of them (in torch 2.13 `selected`, in its backward)."""
    compiling = graph_function.emit

    def refusing(gm: Any, *args: Any, **kwargs: Any) -> Any:
        if any("masked_select" in str(node.target) for node in gm.graph.nodes):
            raise RuntimeError("no code for this size")
        return compiling(gm, *args, **kwargs)

    monkeypatch.setattr(graph_function, "emit", refusing)
    net = mpcompile(program(selected), level=level, dtype=torch.float16, emit="aot_eager")
    x = torch.rand(6, 8)
    net(x).sum().backward()
    assert len(compiled_plans(net)) == 2
    assert not torch._dynamo.config.capture_dynamic_output_shape_ops
    assert not tracing_settings._thread.wanted


def test_explained_as_it_is_compiled() -> None:
    (graph,) = explain(program(repeated), torch.rand(6, 8)).graphs
    assert graph.left is None
