"""Module paths start at the model, also behind a graph break inside of a submodule."""

import pytest
import torch
from torch import nn

from mpcompile import Policy, compiled_plans, diagnose, mpcompile

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
    broken: Broken = model[number]  # type: ignore[assignment]
    with torch.no_grad():
        broken.second.weight.fill_(60000.0)
        broken.second.bias.fill_(60000.0)
        broken.first.bias.fill_(10.0)
        model[1].first.weight.fill_(0.0)  # type: ignore[union-attr, operator]
    report = diagnose(model, torch.ones(2, 4), dtype=torch.float16)
    assert report.first.node.module == f"{number}.second"


def test_a_fault_has_its_whole_path() -> None:
    model = Model()
    broken: Broken = model.blocks[1][0]  # type: ignore[assignment, index]
    with torch.no_grad():
        broken.second.weight.fill_(60000.0)
        broken.second.bias.fill_(60000.0)
        broken.first.bias.fill_(10.0)
    report = diagnose(model, torch.ones(2, 4), dtype=torch.float16)
    assert report.first.node.module == "blocks.1.0.second"
