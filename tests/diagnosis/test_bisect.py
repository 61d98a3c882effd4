"""Bisection finds a culprit that was planted: an operator that overflows, a pass that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from mpcompile import MPCompileError, Policy, cli, mpcompile, pipeline
from mpcompile.diagnosis import Outcome, bisect

X = torch.ones(3, 8)


class Net(nn.Module):
    """Layers that run low and one, on demand, whose result is beyond FP16's range."""

    def __init__(self, big: int | None = None, layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.big = big
        if big is not None:
            with torch.no_grad():
                self.layers[big].weight.mul_(2.0**19)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x + x.sin())
            if i == self.big:
                x = x / 2.0**19
        return x.square().mean()


OPTIONS = {"dtype": torch.float16}


def test_nothing_is_wrong() -> None:
    assert bisect(Net(), (X,), options=OPTIONS) is None


@pytest.mark.slow("runs a model step by step, many times")
@pytest.mark.parametrize("big", [0, 3, 5])
def test_the_operator_that_overflows(big: int) -> None:
    model = Net(big)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = bisect(model, (X,), options=OPTIONS)
    assert found is not None
    (node,) = found.nodes
    assert (node.module, node.op, node.precision) == (f"layers.{big}", "aten::linear", "LOW")
    assert found.passes == ()
    text = str(found)
    for part in (node.name, f"(layers.{big})", "test_bisect.py:", node.rule, node.reason):
        assert part in text
    assert all(p.grad is None for p in model.parameters()), "only copies are run"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    cured = mpcompile(Net(big), emit="eager", policy=Policy(nodes={node.name: "fp32"}), **OPTIONS)
    assert cured(X).isfinite()


@pytest.mark.slow("runs a model step by step, many times")
def test_it_takes_few_trials() -> None:
    """All passes, and then the logarithm of the number of operators, two for each halving."""
    said: list[str] = []
    found = bisect(Net(2, layers=16), (X,), options=OPTIONS, progress=said.append)
    assert found is not None
    assert found.trials <= 3 + len(pipeline.MAY_BE_DISABLED) + 2 * 5
    assert said[:2] == ["in FP32", "1: compiled"]
    assert len(said) == 1 + found.trials


@pytest.mark.slow("runs a model step by step, many times")
def test_a_pass_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow_softmax(gm: fx.GraphModule, config: Any) -> bool:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.target = torch.ops.aten.cos.default
        return True

    planted = tuple(
        narrow_softmax if p.__name__ == "narrow_softmax" else p for p in pipeline.PASSES
    )
    monkeypatch.setattr(pipeline, "PASSES", planted)
    found = bisect(Net(), (X,), options=OPTIONS)
    assert found is not None
    assert (found.passes, found.nodes) == (("narrow_softmax",), ())
    assert "pass narrow_softmax" in str(found)


class Branches(nn.Module):
    """Two layers whose gradients don't depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).square().mean() + self.b(x).square().mean()


@pytest.mark.slow("runs a model step by step, many times")
def test_two_that_break_it_together_are_both_named() -> None:
    def agrees(ours: Outcome, full: Outcome) -> bool:
        """One of the two may run low."""
        names = ("a.bias", "b.bias")
        return any(torch.equal(ours.gradients[n], full.gradients[n]) for n in names)  # type: ignore[arg-type]

    found = bisect(Branches(), (X,), options=OPTIONS, agrees=agrees)
    assert found is not None
    assert {node.module for node in found.nodes} == {"a", "b"}


def test_the_users_policy_stays() -> None:
    policy = Policy(modules={"layers.1": "fp32"})
    found = bisect(Net(1), (X,), options={**OPTIONS, "policy": policy})
    assert found is None, "the operator that would overflow is in FP32 by the user's word"


def test_a_model_that_is_wrong_in_fp32() -> None:
    model = Net()
    with torch.no_grad():
        model.layers[0].weight.fill_(float("nan"))
    with pytest.raises(MPCompileError, match="disagrees with itself in FP32"):
        bisect(model, (X,), options=OPTIONS)


def test_a_model_without_gradients() -> None:
    with pytest.raises(MPCompileError, match="nothing that has a gradient"):
        bisect(nn.Flatten(), (X,), options=OPTIONS)


@pytest.mark.slow("runs a model step by step, many times")
@pytest.mark.parametrize(("factory", "said"), [("bad", "(layers.1)"), ("good", "nothing breaks")])
def test_the_command(
    factory: str, said: str, tmp_path: Any, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bisected.py").write_text(
        "from test_bisect import Net, X\n"
        "def bad(): return Net(1, layers=3), (X,)\n"
        "def good(): return Net(layers=2), (X,)\n"
    )
    assert cli.main(["bisect", f"bisected:{factory}", "--dtype", "float16"]) == 0
    assert said in capsys.readouterr().out
