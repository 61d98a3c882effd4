"""What is asked about a model that `torch.compile(backend="mpcompile")` has compiled."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_of import module_of
from torch import nn

from mpcompile import LossScale, MPCompileError, compiled_plans, diagnose, loss_scale_of, mpcompile

OPTIONS: dict[str, Any] = {"dtype": torch.float16, "level": "O2", "emit": "eager"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self.a(x).relu())


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def by_torch(net: nn.Module, **options: Any) -> Any:
    return torch.compile(net, backend="mpcompile", options={**OPTIONS, **options})


def in_place(net: nn.Module, **options: Any) -> Any:
    net.compile(backend="mpcompile", options={**OPTIONS, **options})
    return net


def in_a_function(net: nn.Module, **options: Any) -> Any:
    return torch.compile(lambda x: net(x), backend="mpcompile", options={**OPTIONS, **options})


WAYS = [by_torch, in_place, in_a_function]


@pytest.mark.parametrize("way", WAYS)
def test_it_answers_as_for_the_other_way(way: Callable[..., Any]) -> None:
    net, scale = made(), LossScale.dynamic(init_scale=512.0)
    compiled = way(net, loss_scale=scale)
    compiled(torch.randn(2, 8)).sum().backward()
    asked = [net] if way is in_a_function else [net, compiled]
    for one in asked:
        (plan,) = compiled_plans(one)
        assert plan.level == "O2"
        assert [n.precision for n in plan.nodes if n.op == "aten::linear"] == ["LOW", "LOW"]
        assert loss_scale_of(one) is scale
    report = diagnose(net, torch.randn(2, 8), loss_fn=torch.sum)
    assert report.scale == scale.value


def test_its_own_scale() -> None:
    net = made()
    compiled = by_torch(net)
    compiled(torch.randn(2, 8)).sum().backward()
    scale = loss_scale_of(compiled)
    assert scale is loss_scale_of(net)
    assert scale.value > 1


def test_every_graph_is_told() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        h = m.a(x)
        torch._dynamo.graph_break()
        return m.b(h)

    net = module_of(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    by_torch(net)(torch.randn(2, 8)).sum().backward()
    plans = compiled_plans(net)
    assert [[n.module for n in p.nodes if n.op == "aten::linear"] for p in plans] == [["a"], ["b"]]


def test_what_was_not_compiled() -> None:
    net = made()
    by_torch(net)  # never called
    with pytest.raises(MPCompileError, match="was not compiled by mpcompile"):
        compiled_plans(net)
    mpcompile(net, **OPTIONS)
    assert compiled_plans(net) == []


def test_nothing_is_kept_alive() -> None:
    net = made()
    by_torch(net)(torch.randn(2, 8))
    alive = weakref.ref(net.a.weight)
    del net
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None


class Calls(nn.Module):
    """Holds a compiled module, as a list does."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.nets = nn.ModuleList([net])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nets[0](x).relu()


AROUND: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "sequential": lambda net: torch.compile(nn.Sequential(net, nn.ReLU()), backend="aot_eager"),
    "function": lambda net: torch.compile(lambda x: net(x).relu(), backend="aot_eager"),
    "module": lambda net: torch.compile(Calls(net), backend="aot_eager"),
    "in place": lambda net: _compiled_in_place(Calls(net)),
    "dynamic": lambda net: torch.compile(Calls(net), backend="aot_eager", dynamic=True),
}


def _compiled_in_place(net: nn.Module) -> nn.Module:
    net.compile(backend="aot_eager")
    return net


@pytest.mark.parametrize("first", ["called before", "trained", "evaluated"])
@pytest.mark.parametrize("how", AROUND)
def test_compiled_by_us_within_what_torch_compiles(how: str, first: str) -> None:
    """Otherwise torch traces the forward of a module without hooks, which would run in FP32."""
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8)
    mpcompile(net, dtype=torch.bfloat16, emit="aot_eager", strict=True)
    if first == "called before":
        net(x)
    around = AROUND[how](net)
    with torch.set_grad_enabled(first != "evaluated"):
        low = around(x)
        assert torch.equal(low, net(x).relu())
        assert not torch.equal(low, net[1](net[0](x)).relu())  # in FP32
    if first != "evaluated":
        low.sum().backward()
        assert all(torch.any(p.grad) for p in net.parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["function", "method", "step"])
def test_functions_compiled_by_us_within_what_torch_compiles(kind: str) -> None:
    net, x = nn.Linear(8, 8), torch.randn(2, 8)
    ours = mpcompile(dtype=torch.bfloat16, emit="aot_eager", strict=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().sum()
        loss.backward()
        return loss

    if kind == "method":
        net.run = ours(lambda x: net(x))
    run = {"function": ours(lambda x: net(x)), "method": lambda x: net.run(x), "step": ours(step)}
    plain = (lambda x: net(x).square().sum()) if kind == "step" else net
    low = torch.compile(lambda x: run[kind](x) * 1, backend="aot_eager")(x)
    assert torch.equal(low, run[kind](x))
    assert not torch.equal(low, plain(x))


def test_copies_of_what_is_compiled_stay_plain() -> None:
    net = mpcompile(nn.Sequential(nn.Linear(8, 8)), dtype=torch.bfloat16, emit="aot_eager")
    x = torch.randn(2, 8)
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        around = torch.compile(nn.Sequential(copied), backend="aot_eager", fullgraph=True)
        assert torch.equal(around(x), copied[0](x))
        assert not copied._forward_pre_hooks
