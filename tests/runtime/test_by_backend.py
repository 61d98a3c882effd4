"""What is asked about a model that `torch.compile(backend="mpcompile")` has compiled."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_of import module_of
from torch import nn

from mpcompile import LossScale, MPCompileError, compiled_plans, diagnose, loss_scale_of, mpcompile

OPTIONS: dict[str, Any] = {"dtype": torch.float16, "level": "O2", "emit": "eager"}


def made() -> Any:
    torch.manual_seed(0)
    return module_of(lambda m, x: m.b(m.a(x).relu()), a=nn.Linear(8, 8), b=nn.Linear(8, 4))


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
    assert diagnose(net, torch.randn(2, 8), loss_fn=torch.sum).scale == scale.value


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
