"""What `explain`, `diagnose` and `calibrate` may be asked about, and what they refuse."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_of import module_of
from torch import nn

from mpcompile import MPCompileError, calibrate, diagnose, explain, mpcompile

X = torch.ones(2, 4)


def hot() -> nn.Sequential:
    """Its result leaves FP16's range."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1000.0)  # type: ignore[operator, union-attr]
        model[1].weight.fill_(1000.0)  # type: ignore[operator, union-attr]
    return model


def wrapper_of(*modules: nn.Module) -> nn.Module:
    """As a trainer's or DDP's."""
    return nn.Sequential(OrderedDict(inner=nn.Sequential(*modules)))


def compiled(**options: Any) -> nn.Module:
    return mpcompile(hot(), dtype=torch.float16, level="O2", emit="eager", **options)


def test_a_wrappers_options_are_those_of_the_module_inside() -> None:
    wrapper = wrapper_of(compiled())
    report = diagnose(wrapper, X)
    assert (report.level, report.dtype) == ("O2", "float16")
    assert report.first.node.module == "inner.0.1"
    assert (explain(wrapper, X).level, explain(wrapper, X).dtype) == ("O2", "float16")
    assert calibrate(wrapper, [X]).nodes


def test_several_modules_inside_are_refused() -> None:
    wrapper = wrapper_of(compiled(), compiled())
    for ask in (explain, diagnose):
        with pytest.raises(MPCompileError, match=r"\(inner\.0, inner\.1\): ask about one of them"):
            ask(wrapper, X)


def test_what_torch_compile_returned_is_looked_into() -> None:
    optimized = torch.compile(hot(), backend="eager")
    report = diagnose(optimized, X, dtype=torch.float16)
    assert (report.model, report.first is not None) == ("Sequential", True)
    assert explain(optimized, X, dtype=torch.float16).nodes
    assert calibrate(optimized, [X], dtype=torch.float16).nodes


def function(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    "ask", [explain, diagnose, lambda model, x: calibrate(model, [x])], ids=["e", "d", "c"]
)
def test_a_function_is_refused(ask: Callable[..., Any]) -> None:
    for one in (function, mpcompile(function)):
        with pytest.raises(MPCompileError, match=r"give an nn.Module. .* compiled_plans\(function"):
            ask(one, X)


def frozen() -> nn.Module:
    return hot().requires_grad_(False)


@pytest.mark.parametrize("make", [nn.Identity, frozen])
def test_nothing_to_train(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(MPCompileError, match=r"diagnose: no parameter of .* requires a gradient"):
        diagnose(make(), X)
    with pytest.raises(MPCompileError, match=r"calibrate: no parameter of .* requires a gradient"):
        calibrate(make(), [X])


@pytest.mark.parametrize("loss_fn", [3, F.mse_loss, lambda: None, lambda model, batch: None])
def test_a_loss_function_of_another_kind(loss_fn: Any) -> None:
    with pytest.raises(MPCompileError, match=r"called as loss_fn\(result\), as in `lambda"):
        diagnose(hot(), X, loss_fn=loss_fn)


def test_a_gradient_that_meets_a_zero_is_no_fault() -> None:
    """The derivative of the root is infinite where relu's is zero."""
    model = module_of(lambda m, x: F.relu(m.layer(x)).sqrt(), layer=nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model.layer.weight.copy_(torch.eye(4) - 0.5)
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    model(x).sum().backward()
    assert model.layer.weight.grad.isfinite().all()  # the premise
    assert diagnose(model, x, dtype=torch.float16).faults == ()


def test_an_input_that_is_not_finite_is_named() -> None:
    report = diagnose(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), X / 0, dtype=torch.float16)
    assert "an input of the graph that is not finite itself" in report.first.reason


def test_a_name_in_several_graphs_is_told() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.first(x)
        torch._dynamo.graph_break()
        return m.second(y)

    first, second = hot()
    report = diagnose(module_of(forward, first=first, second=second), X, dtype=torch.float16)
    assert report.first.node.module == "second"
    assert any("several graphs have a node of this name" in note for note in report.notes)


def asked(**options: Any) -> Any:
    return diagnose(nn.Linear(8, 8), torch.ones(4, 8), **options)


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("one of a kind")


class Skipped(nn.Linear):
    @torch._dynamo.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def of_another() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(8, 8).parameters(), lr=1.0)


def lbfgs() -> Any:
    model = nn.Linear(8, 8)
    return diagnose(model, torch.ones(4, 8), optimizer=torch.optim.LBFGS(model.parameters()))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "steps": (lambda: asked(steps=0), "a whole number from 1"),
    "spelling": (lambda: asked(levle="O2"), "did you mean 'level'"),
    "O0": (lambda: asked(level="O0"), "nothing to diagnose"),
    "another loss": (lambda: calibrate(hot(), [X], abs), r"as loss_fn\(model, batch\), as in `lam"),
    "copy": (lambda: diagnose(Uncopyable(4, 4), torch.ones(4, 4)), "one of a kind"),
    "closure": (lbfgs, "LBFGS runs the model again"),
    "stranger": (lambda: asked(optimizer=of_another()), "SGD holds no parameter of Linear"),
    "optimizer": (lambda: asked(optimizer="adam"), "give a torch"),
    "skipped": (
        lambda: diagnose(Skipped(8, 8), torch.ones(4, 8)), "no part of Skipped was compiled"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str) -> None:
    call, said = REFUSED[name]
    with pytest.raises(MPCompileError, match=said):
        call()


def test_what_cannot_run_in_fp64_is_compared_with_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise NotImplementedError("no kernel for float64")

    monkeypatch.setattr("mpcompile.diagnosis.sides.Exact.run", run)
    report = diagnose(nn.Linear(4, 4), torch.randn(2, 4), dtype="float16", emit="eager")
    assert set(report.losses) == {"low", "fp32"}
    assert any("FP32 is taken as exact: no kernel for float64" in note for note in report.notes)
    errors = [n.error for n in report.nodes if n.node.precision == "LOW"]
    assert max(e for e in errors if e is not None) < 2.0**-9  # operands and result are rounded
