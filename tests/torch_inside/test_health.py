"""What can't do without a name that is gone is off: said, and never silently wrong."""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from module_of import module_of
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.parallel import DistributedDataParallel

from mpcompile import (
    MPCompileError,
    MPCompileWarning,
    MPOptimizer,
    calibrate,
    compiled_plans,
    diagnose,
    explain,
    mpcompile,
    plan_for,
)
from mpcompile.torch_inside.private_names import GONE, MissingInTorch, Part, needed_for, why_off

FP16: dict[str, Any] = {"dtype": torch.float16, "emit": "aot_eager"}
WHY = "cannot import name '_name' from 'torch._never_was'"


@contextlib.contextmanager
def without(part: Part) -> Iterator[None]:
    """A name that this part can't do without is gone."""
    GONE.append((part, WHY))
    try:
        yield
    finally:
        GONE.remove((part, WHY))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_why_a_part_is_off() -> None:
    with without(Part.SAY):
        assert why_off(Part.SAY) == WHY
        assert [part for part in Part if why_off(part)] == [Part.SAY]
    assert why_off(Part.SAY) is None


def test_a_name_that_is_gone_switches_its_part_off() -> None:
    with needed_for(Part.EXPLAIN):
        from torch._dynamo import name_that_never_was  # type: ignore[attr-defined]  # noqa: F401
    try:
        with pytest.raises(MPCompileError, match="name_that_never_was"):
            explain(net(), torch.randn(3, 6))
    finally:
        GONE.pop()


# -- what follows ----------------------------------------------------------------------------------


def test_nothing_is_compiled() -> None:
    model = net()
    with without(Part.COMPILE):
        with pytest.raises(MPCompileError, match=f"mpcompile is off on torch .*{WHY}"):
            mpcompile(model)
        through_torch = torch.compile(model, backend="mpcompile")
        with pytest.raises(BackendCompilerFailed, match=WHY):
            through_torch(torch.randn(3, 6))


def test_what_was_compiled_before_is_compiled_no_more() -> None:
    model = mpcompile(net(), **FP16)
    with without(Part.COMPILE), pytest.raises(MPCompileError, match=WHY):
        model(torch.randn(3, 6))


def test_inductor_is_refused_and_aot_eager_is_not() -> None:
    model = net()
    with without(Part.INDUCTOR):
        with pytest.raises(MPCompileError, match=rf'{WHY}\): pass emit="aot_eager"'):
            mpcompile(model)
        with pytest.raises(MPCompileError, match=rf'{WHY}\): pass emit="aot_eager"'):
            MPOptimizer(sgd(model))
        MPOptimizer(sgd(model), emit="eager")
        assert_trains(lambda model: mpcompile(model, **FP16))


def test_mp_optimizer_is_refused_and_its_optimizer_is_not() -> None:
    with without(Part.OPTIMIZER):
        with pytest.raises(MPCompileError, match=f"MPOptimizer is off on torch .*{WHY}"):
            MPOptimizer(sgd(net()))
        assert_trains(lambda model: mpcompile(model, **FP16))


def assert_trains(made: Callable[[nn.Module], nn.Module]) -> None:
    exact, model = net().double(), made(net())
    x = torch.randn(5, 6)
    for one, given in ((exact, x.double()), (model, x)):
        one(given).square().mean().backward()
        sgd(one).step()
    assert compiled_plans(model)[0].left is None
    for true, p in zip(exact.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.double(), true, rtol=1e-3, atol=1e-3)


def test_a_whole_step_runs_in_pieces() -> None:
    with without(Part.WHOLE_STEP):
        assert_runs_in_pieces(WHY)


def assert_runs_in_pieces(why: str) -> None:
    exact, model = net().double(), net()
    optimizers = {exact: sgd(exact), model: sgd(model)}

    def stepping(one: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = one(x).square().mean()
            loss.backward()
            optimizers[one].step()
            optimizers[one].zero_grad()
            return loss

        return step

    plain, whole = stepping(exact), mpcompile(stepping(model), **FP16)
    x = torch.randn(5, 6)
    with pytest.warns(MPCompileWarning, match=f"step runs in pieces .*: {why}"):
        whole(x)
    whole(x)
    for _ in range(2):
        plain(x.double())
    for true, p in zip(exact.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.double(), true, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("emit", ["eager", "aot_eager"])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_layers_stay_in_fp32(layer: type[nn.RNNBase], emit: str) -> None:
    plain = module_of(lambda m, x: m.last(m.rnn(x)[0]), rnn=layer(6, 8), last=nn.Linear(8, 4))
    model = mpcompile(copy.deepcopy(plain), dtype=torch.float16, emit=emit)
    x = torch.randn(5, 3, 6)
    with without(Part.RECURRENT), pytest.warns(MPCompileWarning, match="recurrent layers stay"):
        model(x).square().mean().backward()
    plain(x).square().mean().backward()
    assert WHY in (compiled_plans(model)[0].left or "")
    for p, true in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, true.grad)


@pytest.mark.parametrize("what", ["a module", "a function"])
@pytest.mark.usefixtures("group")
def test_processes_of_a_group_are_refused(what: str) -> None:
    model = net()
    over = DistributedDataParallel(model) if what == "a module" else lambda x: model(x)
    compiled = mpcompile(over, **FP16)
    with without(Part.RANKS), pytest.raises(MPCompileError, match=f"of a group .*{WHY}"):
        compiled(torch.randn(3, 6))


@pytest.mark.slow("compiles by Inductor, or in processes of their own")
def test_a_process_alone_is_not_refused() -> None:
    with without(Part.RANKS):
        assert_trains(lambda model: mpcompile(model, **FP16))


@pytest.mark.parametrize(
    "study",
    [
        explain,
        plan_for,
        lambda model, x: diagnose(model, x),
        lambda model, x: calibrate(model, [x]),
    ],
    ids=["explain", "plan_for", "diagnose", "calibrate"],
)
def test_studies_raise(study: Callable[..., Any]) -> None:
    with without(Part.EXPLAIN), pytest.raises(MPCompileError, match=WHY):
        study(net(), torch.randn(3, 6))


# -- a name that is missed when it is used ---------------------------------------------------------


def gone(*args: Any, **kwargs: Any) -> Any:
    raise MissingInTorch("torch 2.15.0 has no torch._thing, which does something")


def test_a_graph_that_needs_it_stays_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpcompile.capture.pipeline.run", gone)
    plain, model = net(), mpcompile(net(), **FP16)
    x = torch.randn(3, 6)
    with pytest.warns(MPCompileWarning, match=r"left a graph in FP32: .*has no torch\._thing"):
        model(x).sum().backward()
    plain(x).sum().backward()
    for p, true in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, true.grad)


@pytest.mark.parametrize("strict", [False, True])
def test_and_is_an_error_where_nothing_can_be_compiled(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpcompile.compiler.graph_function.emit", gone)
    model = mpcompile(net(), **FP16, strict=strict)
    x = torch.randn(3, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(MPCompileError, match=r"has no torch\._thing"):
            model(x)


def test_a_whole_step_that_needs_it_runs_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpcompile.whole_step.program.cut", gone)
    assert_runs_in_pieces("torch 2.15.0 has no torch._thing, which does something")


def test_mp_optimizer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpcompile.optim.trace.make_fx", gone)
    model = net()
    optimizer = MPOptimizer(sgd(model), emit="eager")
    model(torch.randn(3, 6)).sum().backward()
    with pytest.warns(MPCompileWarning, match=r"can't be compiled: .*has no torch\._thing"):
        optimizer.step()
