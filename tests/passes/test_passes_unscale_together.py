"""unscale_together: what it makes of a backward, that it sees each overflow, and what it leaves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import mpcompile.operators.library
from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.passes.joint.together import unscale_together

UNSCALE = torch.ops.mpcompile.unscale_grad.default
ALL = torch.ops.mpcompile.unscale_all.default
Gradients = Callable[..., list[torch.Tensor]]


def backward(
    gradients: Gradients,
    inputs: list[torch.Tensor],
    then: Callable[..., list[torch.Tensor]] = list,
    mode: str = "fake",
) -> fx.GraphModule:
    """The graph of `gradients(*inputs)`, each of which leaves it as `unscale_grad` makes it: the
    unscaled ones, and how many overflowed, or what `then` makes of these. The scale is the last
    input.
    """

    def program(*given: torch.Tensor) -> list[torch.Tensor]:
        *values, scale = given
        found = torch.zeros((), requires_grad=True)
        made = gradients(*values)
        leaves = [g.detach().requires_grad_() for g in made]
        results = [UNSCALE(leaf, scale, found) for leaf in leaves]
        return then(torch.autograd.grad(results, [*leaves, found], made))

    with torch.enable_grad():
        gm = make_fx(program, select_decomp_table(), tracing_mode=mode)(*inputs)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def rewritten(gradients: Gradients, inputs: list[torch.Tensor]) -> fx.GraphModule:
    gm = backward(gradients, inputs)
    assert unscale_together(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


def targets(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes]


SCALE = torch.tensor(1024.0)


def five(
    t: torch.Tensor, x: torch.Tensor, low: torch.Tensor, row: torch.Tensor, at: torch.Tensor
) -> list[torch.Tensor]:
    """What a product, a sum, a cast, an elementwise operator and a scatter write."""
    scattered = torch.zeros(7, 3).index_put((at,), t, accumulate=True)
    return [(t.t() @ x).view(3, 2, 2), t.sum(0), low.float(), row * 2 + 1, scattered]


def operands() -> list[torch.Tensor]:
    torch.manual_seed(0)
    t, x = torch.randn(8, 3), torch.randn(8, 4)
    return [t, x, torch.randn(100, 5).half(), torch.randn(6), torch.arange(8) % 7]


def test_few_kernels_in_place_of_many() -> None:
    gm = rewritten(five, [*operands(), SCALE])
    text = ir.render(gm.graph).replace("prims::convert_element_type", "cast")
    assert targets(gm).count(ALL) == 1
    assert "mpcompile::unscale_all([view, sum_1, index_put], " in text
    assert targets(gm).count(aten.any.default) == 1  # of the rows of all others
    rows = gm.graph.find_nodes(op="call_function", target=aten.any.dims)
    (both,) = gm.graph.find_nodes(op="call_function", target=aten.cat.default)
    assert [ir.shape(n) for n in rows] == [(100,)]
    assert ir.shape(both) == (106,)
    # The others are multiplied where they are made.
    assert targets(gm).count(aten.mul.Tensor) == 1 + 2 + 2  # `row * 2`; two finite, two unscaled


def test_the_same_gradients() -> None:
    inputs = [*operands(), SCALE]
    expected = backward(five, inputs)(*inputs)
    found = rewritten(five, inputs)(*inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not found[-1]
    assert [g.stride() for g in found] == [g.stride() for g in expected]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(
    ("which", "place", "bad"),
    [
        (0, (7, 2), [0, 1, 4]),  # the tangent: a product, a sum, a scatter
        (1, (0, 0), [0]),
        (2, (99, 4), [2]),
        (2, (0, 0), [2]),
        (3, (5,), [3]),
    ],
)
def test_each_overflow_is_seen(which: int, place: Any, bad: list[int], value: float) -> None:
    gm = rewritten(five, [*operands(), SCALE])
    inputs = [*operands(), SCALE]
    inputs[which][place] = value
    *gradients, found = gm(*inputs)
    assert [i for i, g in enumerate(gradients) if not g.isfinite().all()] == bad
    assert float(found) == 1.0


def test_an_overflow_of_finite_sums() -> None:
    """The largest numbers are no overflow; twice as much is."""
    gm = rewritten(five, [*operands(), SCALE])
    most = torch.finfo(torch.float32).max
    inputs = [*operands(), SCALE]
    inputs[0].zero_()[0] = most
    inputs[1].zero_()
    assert not gm(*inputs)[-1]
    inputs[0][1] = most
    *gradients, found = gm(*inputs)
    assert gradients[1].isinf().all()
    assert found == 1.0


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((3, 70, 2), 210),
        ((64, 9), 64),
        ((63, 9), 567),
        ((2, 2, 3, 3), 36),
        ((5,), 5),
        ((), 1),
        ((128, 3, 80, 80), 384),  # 128 rows would be longer than Inductor adds up at once
        ((70, 9000), 70),  # so are these, but a vector of all elements is as much as the gradient
    ],
)
def test_rows_of_any_shape(shape: tuple[int, ...], rows: int) -> None:
    gm = rewritten(lambda x: [x * 2, x * 3], [torch.ones(shape), SCALE])
    (both,) = gm.graph.find_nodes(op="call_function", target=aten.cat.default)
    assert ir.shape(both) == (2 * rows,)
    x = torch.ones(shape)
    assert not gm(x, SCALE)[-1]
    x.view(-1)[-1] = float("nan")
    assert gm(x, SCALE)[-1] == 1.0


# -- what is written in place ----------------------------------------------------------------------


WRITTEN: dict[str, tuple[Gradients, int]] = {
    "not what is shown twice": (
        lambda x: [(total := x.sum(0)).view(2, 2), total.view(4, 1), x.sum(1)], 1
    ),
    "not what has gaps": (lambda x: [(x.t() @ x)[:, :3], x.sum(1)], 1),
    "not an input": (lambda x: [x.view(12), x.sum(0), x.sum(1)], 2),
    # as by the backward of a batch norm
    "not what is read as well": (lambda x: [total := x.sum(0), x.sum(1), x - total], 1),
    "what lies in another order": (lambda x: [(x.t() @ x).t(), x.sum(1)], 2),
}  # fmt: skip


@pytest.mark.parametrize("case", WRITTEN)
def test_what_is_unscaled_where_it_lies(case: str) -> None:
    gradients, count = WRITTEN[case]
    inputs = [torch.randn(3, 4), SCALE]
    gm = rewritten(gradients, inputs)
    expected = backward(gradients, inputs)(*inputs)
    torch.testing.assert_close(gm(*inputs), expected, rtol=0, atol=0)
    written = gm.graph.find_nodes(op="call_function", target=ALL)
    assert sum(len(n.args[0]) for n in written) == count


# -- what it leaves --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gradients", "mode"),
    [(lambda x: [x.sum(0)], "fake"), (lambda x: [x.sum(0), x.sum(1)], "symbolic")],
)
def test_one_gradient_and_symbolic_sizes_are_left(gradients: Gradients, mode: str) -> None:
    assert not unscale_together(backward(gradients, [torch.randn(3, 4), SCALE], mode=mode).graph)


def test_gradients_that_are_read_are_left() -> None:
    inputs = [torch.randn(3, 4), SCALE]
    gm = backward(
        lambda x: [x.sum(0), x.sum(1), x.sum()], inputs,
        then=lambda grads: [grads[0] + 1, grads[1] * 2, *grads[2:]],
    )  # fmt: skip
    expected = gm(*inputs)
    assert not unscale_together(gm.graph)  # of the three, one is not read
    gm.recompile()
    torch.testing.assert_close(gm(*inputs), expected)


def test_beside_a_gradient_that_is_left() -> None:
    """The number of its overflows is added."""
    x = torch.randn(3, 4)
    gm = backward(
        lambda x: [x.sum(0), x.sum(1), x * 2, x.mean()], [x, SCALE],
        then=lambda grads: [*grads[:2], grads[2] + 1, *grads[3:]],
    )  # fmt: skip
    before = gm(x, SCALE)
    assert unscale_together(gm.graph)
    assert not unscale_together(gm.graph)
    gm.recompile()
    torch.testing.assert_close(gm(x, SCALE), before, rtol=0, atol=0)
    x[0, 0] = torch.finfo(torch.float32).max  # twice as much is the only inf
    x[0, 1] = -x[0, 0]
    assert gm(x, SCALE)[-1] == 1.0


def test_two_gradients_that_are_the_same() -> None:
    """Inductor makes one of what is computed twice: one check is then counted twice."""

    def same(x: torch.Tensor) -> list[torch.Tensor]:
        total = x.sum(0)
        return [total, x.sum(1), x * 2, total]

    inputs = [torch.randn(3, 4), SCALE]
    gm = backward(same, inputs)
    fx_graph_cse = torch._functorch.compile_utils.fx_graph_cse
    merged = fx.GraphModule(gm, fx_graph_cse(gm.graph))
    expected = merged(*inputs)
    assert unscale_together(merged.graph)
    merged.recompile()
    assert targets(merged).count(aten.any.default) == 1
    torch.testing.assert_close(merged(*inputs), expected, rtol=0, atol=0)
    inputs[0][0, 0] = torch.finfo(torch.float32).max
    inputs[0][1, 0] = inputs[0][0, 0]  # the sum of both, which is two of the gradients
    assert merged(*inputs)[-1] == 1.0


def test_no_backward_is_left() -> None:
    gm = make_fx(lambda x: [x.relu(), x.sum()], tracing_mode="fake")(torch.randn(3))
    assert not unscale_together(gm.graph)


def test_the_operator() -> None:
    assert mpcompile.operators.library is not None
    gradients, found = [torch.ones(2, 3), torch.full((), 4.0)], torch.zeros(())
    torch.ops.mpcompile.unscale_all(gradients, found, torch.tensor(0.5))
    assert gradients[0].tolist() == [[0.5] * 3] * 2
    assert gradients[1].item() == 2.0
    assert not found
    gradients[0][1, 2] = float("inf")
    torch.ops.mpcompile.unscale_all(gradients, found, torch.tensor(0.5))
    assert found == 1.0
    gradients[0].zero_()
    torch.ops.mpcompile.unscale_all(gradients, found, torch.tensor(0.5))
    assert found == 1.0  # it is never cleared
