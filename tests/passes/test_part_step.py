"""part_step: the backward of a whole step computes again what that of pieces computes again."""

from collections.abc import Callable

import pytest
import torch
from compare import leaf
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import mpcompile.operators  # noqa: F401  (registers ours)
from mpcompile.lower.joint import JointPasses, Partitioner
from mpcompile.lower.part_step import PartStep

Step = Callable[..., tuple[Tensor, ...]]


def backward(loss: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    first = torch.ops.mpcompile.begin_backward(loss.detach())
    return torch.autograd.grad(loss, weights, first)


def usual(x: Tensor, w: Tensor, v: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    loss = ((x @ w).cos() @ v).square().mean()
    first, second = backward(loss, w, v)
    with torch.no_grad():
        new, losses = w - 0.1 * first, total + loss
        total.copy_(losses)
        w.copy_(new)
    return loss.detach(), second, x


def of_two(x: Tensor, w: Tensor, v: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    """The second forward comes after the first backward."""
    found = [backward(((x @ w).cos() @ v).square().mean(), w, v) for _ in range(2)]
    return tuple(a + b + total for a, b in zip(*found, strict=True))


def of_slopes(x: Tensor, w: Tensor, v: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    (slope,) = torch.autograd.grad(((x @ w).cos() @ v).sum(), x, create_graph=True)
    return (*backward(slope.square().mean() + total, w, v), total)


@pytest.mark.parametrize(
    ("step", "again", "operator", "times"),
    [
        (usual, True, "cos", 2), (usual, False, "cos", 1), (of_two, True, "cos", 2),
        (of_slopes, True, "sin", 2),
    ],
)  # fmt: skip
def test_what_is_computed_how_often(step: Step, again: bool, operator: str, times: int) -> None:
    given = leaf(8, 4), leaf(4, 6), leaf(6, 3), torch.zeros(())
    gm = make_fx(step, decomposition_table=select_decomp_table(), tracing_mode="fake")(*given)
    assert PartStep(Partitioner(None, JointPasses(recomputes=again)))(gm.graph)
    gm.graph.lint()
    gm.recompile()
    calls = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    assert calls.count(f"aten.{operator}.default") == times
    assert not any("mpcompile" in call for call in calls)
    writes = [i for i, call in enumerate(calls) if call == "aten.copy_.default"]
    assert writes == list(range(len(calls) - len(writes), len(calls)))  # at the end
    own = [tensor.detach().clone() for tensor in given]
    wanted = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in given]
    found = [*gm(*own), *own]
    for one, right in zip(found, [*step(*wanted), *wanted], strict=True):
        torch.testing.assert_close(one, right, rtol=1e-6, atol=1e-7)
