"""The numbers of tensors, and what a watched run records, against direct computation."""

from math import inf, nan
from typing import Any

import pytest
import torch
from module_of import module_of
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from mpcompile.diagnosis.sides import Run, Sides, run_low
from mpcompile.observe.record import EXPONENTS, Numbers, Record, Shares, histogram
from mpcompile.observe.watch import Observer, gradient_units
from mpcompile.planner.target import Repairs
from mpcompile.settings import Settings


def numbers(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


# -- numbers ---------------------------------------------------------------------------------------


def test_numbers_of_a_tensor() -> None:
    found = Numbers.of(numbers(0, -0.0, 3, -7, inf, -inf, nan, 2**-140))
    assert found == Numbers(count=8, zeros=2, infs=2, nans=1, amax=7.0, amin=2.0**-140)
    assert found.bad == 3
    assert Numbers.of(numbers(nan)) == Numbers(count=1, nans=1)


def test_numbers_of_several() -> None:
    """Integers, complex numbers and what is empty don't count. Of a sparse one what it stores."""
    with torch.sparse.check_sparse_tensor_invariants():
        sparse = torch.sparse_coo_tensor([[1, 1]], numbers(2, 3), (4,))
    value = [numbers(1, 0), (torch.ones(3, dtype=torch.int64), sparse), torch.empty(0), None, 2.0]
    value.append(torch.ones(1, dtype=torch.complex64))
    assert Numbers.of(value) == Numbers(count=3, zeros=1, amax=5.0, amin=1.0)
    assert Numbers.of(()) == Numbers()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_numbers_keep_the_smallest_of_each_dtype(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    found = Numbers.of(numbers(info.smallest_normal * info.eps, info.max, dtype=dtype))
    assert (found.zeros, found.infs) == (0, 0)
    assert found.amin == info.smallest_normal * info.eps


# FP16: the smallest subnormal is 2**-24, the smallest normal 2**-14, the largest 65504; the next
# step would be 65536, and half of it, 65520, rounds there, as ties go to the even mantissa. Half of
# the smallest subnormal goes to zero, which is even.
FP16 = {
    2.0**-25: "flushed",
    2.0**-25 * (1 + 2**-20): "subnormal",
    2.0**-24: "subnormal",
    2.0**-14 * (1 - 2**-10): "subnormal",
    2.0**-14: "",
    65504.0: "",
    65519.9: "",
    65520.0: "overflowed",
}


@pytest.mark.parametrize(("value", "kind"), FP16.items())
def test_shares_at_the_thresholds_of_fp16(value: float, kind: str) -> None:
    exact = numbers(value, 1.0, -1.0, 0.0, inf, dtype=torch.float64)
    wanted, found = Shares(**{kind: 1 / 3} if kind else {}), Shares.of([exact], torch.float16)
    assert found == wanted, "of those that are finite and not zero"
    assert found.count == 3
    assert Shares.of([exact / 1024], torch.float16, scale=1024) == wanted


def test_shares_of_several_and_of_nothing() -> None:
    """And they know how many values they are of."""
    found = Shares.of([numbers(0, 1, 2**-30), numbers(2**-20, 1e5, inf)], torch.float16)
    assert (found, found.count) == (Shares(0.25, 0.25, 0.25), 4)
    nothing = Shares.of([numbers(0.0, inf)], torch.float16)
    assert (nothing, nothing.count) == (Shares(), 0)


def test_a_histogram_has_the_binary_exponent() -> None:
    values = numbers(0, inf, nan, 1, 1.99, -2, 0.5, 2.0**-120, 1e38, dtype=torch.float64)
    counts = dict(zip(EXPONENTS, histogram(values).tolist(), strict=True))
    wanted = {0: 2, 1: 1, -1: 1, EXPONENTS[0]: 1, EXPONENTS[-1]: 1}
    assert {exponent: count for exponent, count in counts.items() if count} == wanted


# -- runs ------------------------------------------------------------------------------------------


def net() -> Any:
    """`h` is read in FP16, by a linear, and in FP32."""
    torch.manual_seed(0)
    layers = {"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)}
    return module_of(lambda m, x: m.second(h := m.first(x).exp()) + h.cumsum(-1), **layers)


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def sides_of(model: nn.Module, **options: object) -> Sides:
    settings = Settings.parse({"dtype": "float16", "pad": "never", **options})
    torch.manual_seed(1)
    return Sides(
        model, (torch.randn(4, 8),), {}, loss_of, settings, mp_optimizer=False, repairs=Repairs()
    )


def records(run: Run) -> Record:
    ((_, record),) = run.calls
    return record


def test_the_exact_side_is_the_program_in_fp64() -> None:
    sides = sides_of(net())
    sides.loss = torch.sum  # whose gradient is exact in FP32, too
    exact = sides.run("fp64")
    wide = net().double()
    h = wide.first(sides.call[0][0].double())
    h.retain_grad()
    e = h.exp()
    e.retain_grad()
    loss = (wide.second(e) + e.cumsum(-1)).sum()
    loss.backward()
    assert exact.loss == pytest.approx(loss.item(), rel=1e-7), "it leaves the graph in FP32"
    record = records(exact)
    for name, tensor in (("linear", h), ("exp", e)):
        torch.testing.assert_close(record.exact[name], [tensor.detach()], rtol=1e-12, atol=0)
        gradient = record.exact_gradients[name, 0]
        torch.testing.assert_close(gradient, tensor.grad, rtol=1e-12, atol=1e-16)
    assert record.values["exp"].amax == e.max().item()
    activations = ("linear", "exp", "linear_1", "cumsum", "add")
    assert {name for name, _ in record.exact_gradients} > set(activations), "parameters as well"
    assert record.histogram.sum() == len(activations) * h.numel()


def test_errors_are_relative_to_the_norm() -> None:
    """Of FP32: 2**-24 for each element, a little more after a matrix product."""
    sides = sides_of(net())
    exact = sides.run("fp64")
    full = records(sides.run("fp32", exact))
    assert {"linear", "exp", "linear_1", "cumsum", "add"} <= full.errors.keys()
    assert all(error < 1e-6 for error in full.errors.values())
    low, _ = run_low(sides, sides.run("fp32", exact), exact, None)
    assert 2**-14 < records(low).errors["linear"] < 2**-9, "an FP16 rounding is up to 2**-11"


def test_a_part_of_a_gradient_is_not_compared_with_the_whole() -> None:
    """The cast of `h` that the linear reads gets only that part of the gradient of `h`, which is
    far from the sum of both.
    """
    sides = sides_of(net())
    exact = sides.run("fp64")
    low, _ = run_low(sides, sides.run("fp32", exact), exact, None)
    record = records(low)
    assert "exp_f16" in record.gradients
    assert "exp_f16" not in record.gradient_errors
    assert "exp_f16" not in record.lost
    assert record.gradient_errors["exp"] < 0.01


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_units_say_which_gradients_are_scaled(level: str) -> None:
    """Those that are a thousand times as large at a thousand times the scale."""
    sides = sides_of(net(), level=level)
    found = []
    for scale in (1.0, 1024.0):
        sides.scale = scale
        found.append(sides.run("low"))
    ((graph, _),) = found[0].calls
    units = {n.name: scaled for n, scaled in gradient_units(graph.rewritten.graph).items()}
    small, large = (records(run).gradients for run in found)
    small.pop("mp_found")  # the leaf that counts overflows: there are none
    assert {name for name in small if units[name]}, "something is scaled"
    assert {name for name in small if not units[name]}, "and something is not"
    for name in small:
        ratio = large[name].amax / small[name].amax
        assert ratio == pytest.approx(1024.0 if units[name] else 1.0, rel=0.02), name
    for name, gradient in found[0].gradients.items():
        torch.testing.assert_close(found[1].gradients[name], gradient, rtol=0.02, atol=1e-3)


def program(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = torch.mm(x, w).exp()
    return torch.mul(h, h.sum())


def test_a_watched_graph_gives_what_the_graph_gives() -> None:
    """Results and gradients, in the caller's grad mode; no hook stays on a parameter."""
    w, x = torch.randn(3, 3, requires_grad=True), torch.randn(2, 3)
    gm = make_fx(program, pre_dispatch=True)(w, x)
    wanted = program(w, x)
    (gradient,) = torch.autograd.grad(wanted.sum(), w)
    record = Record()
    (found,) = pytree.tree_leaves(Observer(gm, record).run(w, x))
    assert torch.equal(found, wanted)
    found.sum().backward(retain_graph=True)
    assert torch.equal(w.grad, gradient)
    assert not w._backward_hooks
    once = record.gradients["exp"]
    assert once.count == 6, "of the sum over both readers"
    assert [step.node for step in record.steps] == ["mul", "sum_1", "exp", "mm"]
    assert record.steps[0].name == "MulBackward0"
    found.sum().backward()
    assert record.gradients["exp"].count == 2 * once.count, "of both backward passes"
    with torch.no_grad():
        (found,) = pytree.tree_leaves(Observer(gm, Record()).run(w, x))
    assert not found.requires_grad
