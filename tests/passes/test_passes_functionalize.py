"""functionalize: in-place operators become out-of-place where nobody can tell."""

import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import leaf
from graphs import Stage
from op_db_support import OPS, samples_of

from mpcompile import MPCompileWarning, compiled_plans, mpcompile
from mpcompile.passes.graph.canonical_forms import functionalize

pytestmark = pytest.mark.inside


def test_applies_to_private_values() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w)
        h.relu_()
        h += x
        return h * 2

    stage = Stage(functionalize, program, leaf(8, 16), leaf(16, 16))
    assert stage.run()
    stage.expect_text("""\
x: f32[8, 16] = input
w: f32[16, 16] = input
linear: f32[8, 16] = linear(x, w)
relu_: f32[8, 16] = relu(linear)
add_: f32[8, 16] = add(relu_, x)
mul: f32[8, 16] = mul(add_, 2)
return mul
""")


def written_input(x: torch.Tensor) -> Any:
    return x.mul_(2)


def base_read_after_a_view_was_written(x: torch.Tensor) -> Any:
    h = x.sin()
    h.view(-1).mul_(2)
    return h + 1


def view_read_after_its_base_was_written(x: torch.Tensor) -> Any:
    h = x.sin()
    view = h.view(-1)
    h.mul_(2)
    return view + 1


def result_of_an_opaque_call(x: torch.Tensor) -> Any:
    """It may be the memory of what it was given."""
    h = x.sin()
    y = torch.cond(x.sum() > 0, lambda a: a.cos(), lambda a: a.sin(), (h,))
    return y.mul_(2)


def write_that_would_promote(x: torch.Tensor) -> Any:
    h = x.sin()
    return h.mul_(x.double())


def write_without_grad_through_a_tracked_value(x: torch.Tensor) -> Any:
    h = x.sin()
    with torch.no_grad():
        h.mul_(2)
    return h + 1


def an_operator_of_unknown_range(x: torch.Tensor) -> Any:
    """It has no row in the table, so its functional form has none either."""
    return x.sin().bernoulli_(0.5)


@pytest.mark.parametrize(
    "program",
    [
        written_input, base_read_after_a_view_was_written,
        view_read_after_its_base_was_written, result_of_an_opaque_call, write_that_would_promote,
        an_operator_of_unknown_range, write_without_grad_through_a_tracked_value,
    ],
)  # fmt: skip
def test_leaves_what_someone_could_tell(program: Any) -> None:
    tracked = program is write_without_grad_through_a_tracked_value
    stage = Stage(functionalize, program, torch.randn(2, requires_grad=tracked))
    assert not stage.run()
    assert "_(" in stage.text


def test_a_view_whose_base_is_not_read_again() -> None:
    """Written through a view, read through the same view: private all the same."""

    def program(x: torch.Tensor) -> torch.Tensor:
        view = x.sin().view(-1)
        view.relu_()
        return view + 1

    stage = Stage(functionalize, program, torch.randn(5), dynamic=True)
    assert stage.run()
    stage.expect_text("""\
x_size_0: SymInt = input
x: f32[s0] = input
sin: f32[s0] = sin(x)
view: f32[s0] = view(sin, [-1])
relu_: f32[s0] = relu(view)
add: f32[s0] = add(relu_, 1)
return add
""")


# -- every in-place operator ----------------------------------------------------------------------

IN_PLACE = [name for name, op in OPS.items() if op.inplace_variant is not None]

# The first is no operator of a value that autograd follows; the others raise by themselves.
REFUSED = {"resize_", "resize_as_", "float_power"}


def products_around(change: Callable[[torch.Tensor], Any], like: torch.Tensor) -> list[str]:
    """The precisions of a product before, and of one after what changes its result."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = (x @ w).sigmoid().view(-1)[: like.numel()].reshape(like.shape) * 0.4 + 0.3
        change(h)
        return h.reshape(-1, 1) @ w[:1]

    x, w = torch.randn(64, 64), leaf(64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's of betas
        warnings.simplefilter("error", MPCompileWarning)
        compiled = mpcompile(program, dtype=torch.bfloat16, emit="eager", strict=True)
        found, wanted = compiled(x, w), program(x, w)
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05, equal_nan=True)
    nodes = [node for plan in compiled_plans(compiled) for node in plan.nodes]
    return [node.precision for node in nodes if node.op in ("aten::matmul", "aten::mm")]


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.pow_(2),
        lambda h: h.pow_(h.detach()),
        lambda h: operator.ipow(h, 2),
        lambda h: operator.itruediv(h, 2),
        lambda h: operator.imul(h, h.detach()),
        lambda h: h.xlogy_(2),
        lambda h: h.ldexp_(torch.tensor(1)),
    ],
)
def test_products_around_it_are_low(change: Callable[[torch.Tensor], Any]) -> None:
    assert products_around(change, torch.ones(16, 16)) == ["LOW", "LOW"]


@pytest.mark.slow("in-place operators of torch")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(set(IN_PLACE) - REFUSED))
def test_products_around_each_are_low(name: str) -> None:
    op = OPS[name]
    samples = [s for s in samples_of(op, first=12) if s.input.dim() and s.input.numel()]
    sample = next((s for s in samples if s.input.dtype is torch.float32), None)
    if sample is None:
        pytest.skip("it takes no FP32")

    def change(h: torch.Tensor) -> None:
        torch.manual_seed(0)
        op.inplace_variant(h, *sample.args, **sample.kwargs)

    assert products_around(change, sample.input) == ["LOW", "LOW"]
