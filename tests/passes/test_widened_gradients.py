"""Weight gradients in FP32 are nearer to FP64, and every parameter of a compiled model has one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from joint_graphs import Joint, on, weight
from torch import fx, nn

from mpcompile import mpcompile
from mpcompile.ir import aten
from mpcompile.passes.joint.widen_weight_gradients import widen_weight_gradients

WIDE = (aten.mm.dtype, aten.bmm.dtype)


class OnCPU(fx.Interpreter):
    """Runs a graph where no GEMM writes FP32: by FP32 operands, which says the same."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in WIDE:
            return torch.matmul(args[0].float(), args[1].float())
        return super().call_function(target, args, kwargs)


def test_numerics_against_fp64() -> None:
    """Sums beyond FP16's range are finite, and nearer to FP64 than what they replace."""

    def program(w: torch.Tensor, b: torch.Tensor, x: torch.Tensor, tangents: torch.Tensor) -> Any:
        return torch.autograd.grad(F.linear(x, w.half(), b.half()), (w, b), tangents)

    x, tangents = (256 * torch.rand(512, 8)).half(), (1 + torch.rand(512, 6)).half()
    inputs = weight(6, 8), weight(6), x, 16 * tangents
    joint = Joint(program, *inputs)
    with torch.no_grad():
        before = OnCPU(joint.gm, graph=joint.graph).run(*inputs)
        joint.run_twice()
        after = OnCPU(joint.gm, graph=joint.graph).run(*inputs)
    expected = (16 * tangents.double()).T @ x.double(), (16 * tangents.double()).sum(0)
    assert before[0].isinf().all()
    for wide, exact, rounded in zip(after, expected, before, strict=True):
        torch.testing.assert_close(wide.double(), exact, rtol=1e-6, atol=0)
        assert ((wide - exact).abs() <= (rounded - exact).abs()).all()


def test_every_parameter_of_a_compiled_model() -> None:
    """In the graph that Inductor hands over, with the scale, the checks and the bookkeeping."""
    found: list[tuple[bool, int, int]] = []

    def look(graph: fx.Graph) -> None:
        copy = fx.Graph()
        copy.output(copy.graph_copy(graph, {}))
        changed = widen_weight_gradients(on("cuda", copy))
        targets = [node.target for node in copy.nodes]
        sums = [n for n in copy.nodes if n.target is aten.sum.dim_IntList and "dtype" in n.kwargs]
        found.append((changed, targets.count(aten.mm.dtype), len(sums)))

    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
    fast = mpcompile(net, dtype=torch.float16, options={"joint_custom_post_pass": look})
    fast(torch.randn(5, 8)).sum().backward()
    assert found == [(True, 2, 2)]


def test_every_padded_parameter_of_a_compiled_model() -> None:
    found: list[bool] = []

    def look(graph: fx.Graph) -> None:
        copy = fx.Graph()
        copy.output(copy.graph_copy(graph, {}))
        widen_weight_gradients(on("cuda", copy))
        cuts = copy.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
        found.extend(n.meta["val"].dtype is torch.float32 for n in cuts if min(n.args[1]) < 0)

    net = nn.Sequential(nn.Linear(13, 21), nn.GELU(), nn.Linear(21, 3))
    fast = mpcompile(
        net, dtype=torch.float16, pad="always", options={"joint_custom_post_pass": look}
    )
    fast(torch.randn(8, 13)).sum().backward()
    assert found == [True] * 4
