"""`explain`: what it says of the backward, of graph breaks, and of a compiled model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from explained import MODELS, Broken, checkpointed, squared, tagger
from small_calls import Calls
from small_calls import X as SMALL
from torch import Tensor, nn

from mpcompile import (
    MPCompileError,
    MPCompileWarning,
    MPOptimizer,
    Policy,
    compiled_plans,
    explain,
    loss_scale_of,
    mpcompile,
)
from mpcompile.planner.partitioned import BackwardNode
from mpcompile.plans import Plan

X = torch.ones(4, 8)


def backward(model: nn.Module, x: Tensor, **options: Any) -> tuple[BackwardNode, ...]:
    """The backward of the one graph; each of its nodes belongs to one of the plan, or to none."""
    (plan,) = explain(model, x, **options).graphs
    names = {node.name for node in plan.nodes}
    assert {node.forward for node in plan.backward} <= names | {""}
    return plan.backward


def of(nodes: tuple[BackwardNode, ...], forward: str) -> list[tuple[str, str]]:
    """The operators that compute the gradients of one node of the plan, with their results."""
    return [(n.op, n.result) for n in nodes if n.forward == forward and not n.recomputed]


# -- the backward ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_products_of_the_backward(dtype: torch.dtype) -> None:
    """Each linear layer has two; the first one has one, because its input needs no gradient."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    found = backward(model, X, dtype=dtype)
    low = "f16" if dtype is torch.float16 else "bf16"
    products = [(n.op, n.result, n.forward) for n in found if n.op == "aten::mm"]
    assert products == [
        ("aten::mm", f"{low}[4, 16]", "linear_1"),
        ("aten::mm", f"{low}[8, 16]", "linear_1"),
        ("aten::mm", f"{low}[16, 8]", "linear"),
    ]


def test_casts_and_scaling_of_the_backward() -> None:
    """The backward of a cast is a cast back; that of the scale multiplies, of unscaling divides."""
    model = nn.Linear(8, 8)
    found = backward(model, X, dtype=torch.float16)
    assert of(found, "linear_f32_scale") == [("aten::mul", "f32[4, 8]")]
    assert of(found, "linear_f32") == [("prims::convert_element_type", "f16[4, 8]")]
    cast, unscale = "weight_f16", "weight_unscale"
    assert of(found, cast) == [("prims::convert_element_type", "f32[8, 8]")]
    assert ("aten::mul", "f32[8, 8]") in of(found, unscale)
    assert ("aten::any", "b8[]") in of(found, unscale)  # the check for an overflow


def test_a_cast_of_an_input_without_gradient_has_none() -> None:
    """It carries the number of the node before it."""
    (plan,) = explain(nn.Linear(8, 8), X, dtype=torch.bfloat16).graphs
    assert "args_0_bf16" in {node.name for node in plan.nodes}
    assert not of(plan.backward, "args_0_bf16")


def test_a_sum_of_gradients_belongs_to_none() -> None:
    """Two readers of a value: autograd adds their gradients outside of any node."""
    found = backward(Calls(lambda layer, x: (y := layer(x)).exp() + y.sin()), SMALL)
    assert [n.op for n in found if not n.forward] == ["aten::add"]


def test_what_is_computed_again() -> None:
    """The checkpointed part, up to the input of its last product."""
    found = backward(checkpointed(), X, dtype=torch.bfloat16)
    # (A product's weight is cast and turned again, not the product made.)
    again = {n.forward for n in found if n.recomputed and n.op != "aten::permute"}
    assert {"linear", "gelu"} <= again
    assert not {"linear_2"} & again
    # Outside of a checkpoint the product is kept.
    plain = backward(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), X)
    assert "linear" not in {n.forward for n in plain if n.recomputed}


def test_a_backward_of_the_users() -> None:
    """2 * x * grad, in FP32."""
    (plan,) = explain(squared(), X, dtype=torch.float16).graphs
    (own,) = [n.name for n in plan.nodes if "autograd_function" in n.op]
    assert of(plan.backward, own) == [("aten::mul", "f32[4, 8]")] * 2


@pytest.mark.slow("plans of several models")
def test_pieces_around_a_recurrent_layer() -> None:
    """The head runs backward first, then the embedding; the LSTM's own backward isn't seen."""
    found = backward(tagger(), MODELS[tagger](), dtype=torch.bfloat16)
    order = [n.forward for n in found]
    assert order.index("linear") < order.index("embedding")
    assert not any("lstm" in name for name in order)


def test_each_graph_has_its_own() -> None:
    first, second = (plan.backward for plan in explain(Broken(), X).graphs)
    assert {"linear", "exp"} == {n.forward for n in first if n.op in ("aten::mm", "aten::mul")}
    assert "linear" in {n.forward for n in second}


def test_a_frozen_model_has_no_backward() -> None:
    assert backward(nn.Linear(8, 8).requires_grad_(False), X) == ()


# -- graph breaks ----------------------------------------------------------------------------------


@torch.compiler.disable
def untraced(x: Tensor) -> Tensor:
    return x + 1


def prints(layer: nn.Linear, x: Tensor) -> Tensor:
    y = layer(x)
    print("", end="")
    return layer(y)


def line(function: Callable[..., Any], offset: int) -> str:
    return f"(test_explain.py:{function.__code__.co_firstlineno + offset})"


def in_a_helper(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(prints(layer, x))


def disabled(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(untraced(layer(x)))


BREAKS = {
    prints: ("Failed to trace builtin operator: Dynamo does not know how to", line(prints, 2)),
    in_a_helper: ("Failed to trace builtin operator", line(prints, 2)),
    disabled: ("Skip calling `torch.compiler.disable()`d function", line(disabled, 1)),
}


@pytest.mark.parametrize("body", BREAKS)
def test_a_break_tells_its_reason_and_line(body: Any) -> None:
    model, (reason, where) = Calls(body), BREAKS[body]
    planned = explain(model, SMALL)
    broken, *_, last = planned.graphs
    assert broken.ends_with.startswith(reason)
    assert broken.ends_with.endswith(where)
    assert "\n" not in broken.ends_with
    assert " at 0x" not in broken.ends_with
    assert last.ends_with is None
    assert f"graph break: {broken.ends_with}" in str(planned)


def planned_ops(plan: Plan) -> list[list[str]]:
    """Of each graph, the operators of the program."""
    graphs = [[n.op for n in graph.nodes if not n.is_added] for graph in plan.graphs]
    return [[op.removeprefix("aten::") for op in graph] for graph in graphs]


def test_a_branch_on_a_value() -> None:
    """The compile says so, of the way that it goes; a plan has the graphs of both ways."""

    def branches(layer: nn.Linear, x: Tensor) -> Tensor:
        y = layer(x)
        return y.exp() if y.sum() > 0 else layer(y)

    model = mpcompile(Calls(branches), emit="eager")
    model(SMALL)
    first, *_, last = compiled_plans(model)
    assert last.ends_with is None
    says = "Data-dependent branching: the program branches on the value of a tensor"
    assert first.ends_with == f"{says} {line(branches, 2)}"
    plan = explain(model, SMALL)
    assert plan.breaks == (first.ends_with,)
    assert sorted(planned_ops(plan)) == [["exp"], ["linear"], ["linear", "sum", "gt"]]


def test_ways_of_branching() -> None:
    """One may raise, a condition may stand below another, and a loop ends."""

    def branches(layer: nn.Linear, x: Tensor) -> Tensor:
        y = layer(x)
        if y.isnan().any():
            raise ValueError("NaN")
        if y.sum() > 0:
            return layer(y).exp() if y.max() > 1 else layer(y).sin()
        return y.cos()

    plan = explain(Calls(branches), SMALL)
    assert {"exp", "sin", "cos"} <= {op for ops in planned_ops(plan) for op in ops}
    assert len(plan.breaks) >= 3

    def loops(layer: nn.Linear, x: Tensor) -> Tensor:
        y = layer(x)
        while not y.norm() < 1:
            y = layer(y)
        return y

    assert explain(Calls(loops), SMALL).breaks

    def always(layer: nn.Linear, x: Tensor) -> Tensor:
        if layer(x).sum() > 0:
            raise ValueError("today")
        raise ValueError("not today")

    with pytest.raises(MPCompileError, match="ValueError: not today"):
        explain(Calls(always), SMALL)


def test_a_graph_that_is_left_may_break() -> None:
    planned = explain(Calls(prints), SMALL, level="O0")
    assert [plan.ends_with is None for plan in planned.graphs] == [False, True]
    assert planned.left == ('level="O0" was asked for',) * 2


# -- a compiled model ------------------------------------------------------------------------------


def test_its_policy_matches_or_complains() -> None:
    policy = Policy(nodes={"linera": "fp32"})
    model = mpcompile(nn.Linear(8, 8), policy=policy)
    with pytest.warns(MPCompileWarning, match="no node 'linera'; did you mean 'linear'"):
        explain(model, X)


def test_its_dump_is_not_taken_over(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPCOMPILE_DUMP", raising=False)
    model = mpcompile(nn.Linear(8, 8), dump=tmp_path / "theirs")
    explain(model, X)
    assert not list((tmp_path / "theirs").iterdir())
    explain(model, X, dump=tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir())


def test_it_may_be_explained_before_its_optimizer_exists() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    assumed = explain(model, X, level="O2", dtype="float16", mp_optimizer=True).graphs
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    found = explain(model, X, level="O2", dtype="float16").graphs
    assert [plan.nodes for plan in assumed] == [plan.nodes for plan in found]
    assert not any("weight" in n.name and n.op == "aten::to" for n in found[0].nodes)
    del optimizer  # the parameters know it only as long as it lives


def test_its_scale_is_only_read() -> None:
    model = mpcompile(nn.Linear(8, 8), dtype=torch.float16, emit="eager")
    explain(model, X)
    scale = loss_scale_of(model)
    assert (scale.skipped_steps, scale.used, compiled_plans(model)) == (0, None, [])
