"""keep_written_inputs: the backward reads what an input held before the forward wrote it."""

import functools
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mpcompile
from mpcompile.ir import aten
from mpcompile.passes.joint.keep_written_inputs import keep_written_inputs

saving_less = functools.partial(checkpoint, use_reentrant=False)


def program(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Reads x, writes it, and recomputes in the backward from what it had read."""
    before = torch.cos(x)
    narrow = before.half()
    x.relu_()

    def inner(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return F.layer_norm((p @ weight.half()).float(), (8,)) * q

    return saving_less(inner, narrow, before)  # type: ignore[no-any-return]


def gradient(run: Any) -> torch.Tensor:
    torch.manual_seed(0)
    weight, x = (torch.randn(8, 8) * 0.4).requires_grad_(), torch.randn(2, 4, 8)
    result = run(weight, x)
    (result * torch.linspace(-1, 1.5, result.numel()).view(result.shape)).sum().backward()
    assert float(x.min()) >= 0  # the write came out
    return weight.grad


@pytest.mark.slow_rows("compiles by Inductor, or a deep model")
@pytest.mark.parametrize("emit", ["eager", "aot_eager", "inductor"])
def test_gradients(emit: str) -> None:
    run = mpcompile.mpcompile(program, dtype=torch.float16, emit=emit, loss_scale=1024.0)
    wanted = gradient(program)
    assert float((gradient(run) - wanted).norm()) < 1e-2 * float(wanted.norm())


def test_gradients_of_a_graph_left_in_fp32() -> None:
    run = mpcompile.mpcompile(program, level="O0", emit="aot_eager")
    wanted = gradient(program)
    assert float((gradient(run) - wanted).norm()) < 1e-2 * float(wanted.norm())


# -- the pass by itself ---------------------------------------------------------------------------


def forward_graph(keeps: str) -> fx.Graph:
    """X is written; kept is x, a view of it, its cosine, or another input."""
    graph = fx.Graph()
    with FakeTensorMode():
        value, other, cosine = torch.empty(2, 4), torch.empty(2, 4), torch.empty(2, 4)
        view = value.t()
    nodes = {name: graph.placeholder(name) for name in ("x", "other")}
    nodes["x"].meta["val"], nodes["other"].meta["val"] = value, other
    for name, target, result in (("view", aten.t.default, view), ("cos", aten.cos.default, cosine)):
        nodes[name] = graph.call_function(target, (nodes["x"],))
        nodes[name].meta["val"] = result
    graph.call_function(aten.copy_.default, (nodes["x"], nodes["cos"]))
    graph.output((nodes["cos"], nodes[keeps]))
    return graph


@pytest.mark.parametrize("keeps", ["x", "view"])
def test_what_shares_memory_with_a_written_input_is_copied(keeps: str) -> None:
    graph = forward_graph(keeps)
    assert keep_written_inputs(graph, fx.Graph(), 1)
    ((clone,), (write,)) = (
        graph.find_nodes(op="call_function", target=target)
        for target in (aten.clone.default, aten.copy_.default)
    )
    assert clone.next is write
    assert graph.output_node().args[0][1] is clone  # type: ignore[index]
    assert not keep_written_inputs(graph, fx.Graph(), 1)


@pytest.mark.parametrize("keeps", ["cos", "other"])
def test_anything_else_is_left_alone(keeps: str) -> None:
    graph = forward_graph(keeps)
    before = str(graph)
    assert not keep_written_inputs(graph, fx.Graph(), 1)
    assert str(graph) == before
