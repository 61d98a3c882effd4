"""widen_weight_gradients: what leaves the graph leaves the GEMM in FP32; nothing else changes. Such
gradients are nearer to FP64, and every parameter of a compiled model has one.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import leaf
from expecttest import assert_expected_inline
from joint_graphs import Joint, on
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


def results(program: Any, *inputs: torch.Tensor) -> tuple[Joint, Any, Any]:
    """The joint graph, rewritten; what it gave before, and what it gives now."""
    joint = Joint(program, *inputs)
    with torch.no_grad():
        before = OnCPU(joint.gm, graph=joint.graph).run(*inputs)
        joint.run_twice()
        return joint, before, OnCPU(joint.gm, graph=joint.graph).run(*inputs)


def widened(program: Any, *inputs: torch.Tensor) -> Joint:
    """The joint graph, rewritten: its results are those of before, with bits that FP16 has not."""
    joint, before, after = results(program, *inputs)
    torch.testing.assert_close(after, before, rtol=2**-9, atol=2**-9)
    assert all((wide != wide.half()).any() for wide in after)
    return joint


def linear(w: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, tangents: torch.Tensor) -> Any:
    y = F.linear(x, w.half())
    (grad,) = torch.autograd.grad(y, w, tangents)
    return y, grad * scale.reciprocal()


def linear_inputs() -> tuple[torch.Tensor, ...]:
    return leaf(6, 8), torch.randn(4, 8).half(), torch.tensor(2.0), torch.randn(4, 6).half()


def test_the_product_is_computed_in_fp32() -> None:
    joint = Joint(linear, *linear_inputs())
    joint.run_twice()
    assert_expected_inline(
        joint.text,
        """\
w_1: f32[6, 8] = input
x_1: f16[4, 8] = input
scale_1: f32[] = input
tangents_1: f16[4, 6] = input
convert_element_type: f16[6, 8] = cast(w_1, f16)
permute: f16[8, 6] = permute(convert_element_type, [1, 0])
mm: f16[4, 6] = mm(x_1, permute)
permute_1: f16[6, 4] = permute(tangents_1, [1, 0])
mm_1: f32[6, 8] = mm(permute_1, x_1, f32)
permute_2: f32[8, 6] = permute(mm_1, [1, 0])
permute_3: f32[6, 8] = permute(permute_2, [1, 0])
reciprocal: f32[] = reciprocal(scale_1)
mul: f32[6, 8] = mul(permute_3, reciprocal)
return mm, mul
""",
    )


def test_elsewhere_nothing_changes() -> None:
    assert not Joint(linear, *linear_inputs(), device="cpu").run()


def test_symbolic_sizes() -> None:
    joint = Joint(linear, *linear_inputs(), tracing_mode="symbolic")
    joint.run_twice()
    assert aten.mm.dtype in joint.targets


def half(*size: int) -> torch.Tensor:
    return torch.randn(size).half()


def grads(result: torch.Tensor, tangents: torch.Tensor, *wanted: torch.Tensor) -> Any:
    return torch.autograd.grad(result, wanted, tangents)


def used_twice(w: torch.Tensor, x: torch.Tensor, tangents: torch.Tensor) -> Any:
    low = w.half()
    return grads(F.linear(F.linear(x, low), low), tangents, w)


def read_otherwise(w: torch.Tensor, x: torch.Tensor, tangents: torch.Tensor) -> Any:
    low = w.half()
    return grads(F.linear(x, low) + low.tanh().sum(), tangents, w)


def with_a_bias(w: torch.Tensor, b: torch.Tensor, x: torch.Tensor, tangents: torch.Tensor) -> Any:
    return grads(F.linear(x, w.half(), b.half()), tangents, w, b)


def padded(w: torch.Tensor, b: torch.Tensor, x: torch.Tensor, tangents: torch.Tensor) -> Any:
    y = F.linear(x, F.pad(w.half(), [0, 1, 0, 2]), F.pad(b.half(), [0, 2]))
    return grads(y, tangents, w, b)


WIDENED: dict[str, tuple[Any, Any, list[str]]] = {
    "a weight for each expert, stored transposed and flat": (
        lambda w, x, tangents: grads(
            torch.bmm(x, w.half().view(3, 5, 4).transpose(1, 2)), tangents, w
        ),
        lambda: (leaf(15, 4), half(3, 7, 4), half(3, 7, 5)),
        ["bmm_1: f32[3, 4, 5] = bmm(permute_1, tangents_1, f32)"],
    ),
    "a bias": (
        with_a_bias,
        lambda: (leaf(6, 8), leaf(6), half(2, 4, 8), half(2, 4, 6)),
        ["mm: f32[6, 8] = mm(permute_1, view, f32)",
         "sum_1: f32[1, 6] = sum(view_2, [0], True, dtype=f32)"],
    ),
    "padded: what is cut off is a negative pad": (
        padded,
        lambda: (leaf(6, 7), leaf(6), half(4, 8), half(4, 8)),
        ["constant_pad_nd_2: f32[6] = constant_pad_nd(view, [0, -2])",
         "constant_pad_nd_3: f32[6, 7] = constant_pad_nd(permute_3, [0, -1, 0, -2])"],
    ),
    "used twice: the sum is in FP32, the gradient between is as it was": (
        used_twice,
        lambda: (lambda x: (leaf(8, 8), x, half(4, 8)))(half(4, 8)),
        ["mm_3: f16[4, 8] = mm(tangents_1, permute_4)",
         "add: f32[8, 8] = add(permute_5, permute_8)"],
    ),
    "what has no FP32 twin is cast where it flows in": (
        read_otherwise,
        lambda: (leaf(6, 8), half(4, 8), half(4, 6)),
        ["mm_1: f32[6, 8] = mm(permute_1, x_1, f32)",
         "convert_element_type_default: f32[6, 8] = cast(convert_element_type_5, f32)",
         "add_1: f32[6, 8] = add(convert_element_type_default, permute_3)"],
    ),
}  # fmt: skip


def test_bfloat16() -> None:
    program = lambda w, x, tangents: grads(F.linear(x, w.bfloat16()), tangents, w)  # noqa: E731
    joint = Joint(program, leaf(6, 8), half(4, 8).bfloat16(), half(4, 6).bfloat16())
    joint.run_twice()
    assert "mm_1: f32[6, 8] = mm(permute_1, x_1, f32)" in joint.text


@pytest.mark.parametrize("case", WIDENED)
def test_what_is_widened(case: str) -> None:
    program, inputs, lines = WIDENED[case]
    joint = widened(program, *inputs())
    for line in lines:
        assert line in joint.text
    if case.startswith("used twice"):
        assert [joint.targets.count(op) for op in (aten.mm.dtype, aten.mm.default)] == [2, 2]


@pytest.mark.parametrize("of", ["the product", "a view"])
def test_a_second_reader_keeps_the_product(of: str) -> None:
    def program(w: torch.Tensor, x: torch.Tensor, tangents: torch.Tensor) -> Any:
        (grad,) = torch.autograd.grad(F.linear(x, low := w.half()), low, tangents)
        read = grad.view(-1) if of == "a view" else grad
        return read.float(), read

    joint = Joint(program, leaf(6, 8), torch.randn(4, 8).half(), torch.randn(4, 6).half())
    assert not joint.run()


def test_a_gradient_that_stays_in_the_graph_keeps_its_dtype() -> None:
    """Between two layers it is cast up for a normalisation, not for a parameter."""

    def program(w: torch.Tensor, v: torch.Tensor, x: torch.Tensor, tangents: torch.Tensor) -> Any:
        h = F.layer_norm(F.linear(x, w.half()).float(), (6,)).half()
        return torch.autograd.grad(F.linear(h, v.half()), (w, v), tangents)

    inputs = leaf(6, 8), leaf(3, 6), torch.randn(4, 8).half(), torch.randn(4, 3).half()
    joint = Joint(program, *inputs)
    joint.run_twice()
    assert joint.targets.count(aten.mm.dtype) == 2
    assert joint.targets.count(aten.mm.default) == 2  # forward, and the gradient of h


def test_what_is_left() -> None:
    """The forward's own products, and those that are in FP32 anyway."""
    forward = lambda w, x: (torch.mm(x, w.half()).float(),)  # noqa: E731
    assert not Joint(forward, leaf(8, 6), half(4, 8)).run()
    in_fp32 = lambda w, x, tangents: grads(F.linear(x, w), tangents, w)  # noqa: E731
    assert not Joint(in_fp32, leaf(6, 8), torch.randn(4, 8), torch.randn(4, 6)).run()


@pytest.mark.parametrize("factor", ["number", "tensor"])
def test_only_a_product_with_one_number_hands_a_gradient_on(factor: str) -> None:
    def program(w: torch.Tensor, x: torch.Tensor, m: torch.Tensor, tangents: torch.Tensor) -> Any:
        (grad,) = torch.autograd.grad(F.linear(x, w.half()), w, tangents)
        return (grad * (0.5 if factor == "number" else m),)

    inputs = leaf(6, 8), torch.randn(4, 8).half(), torch.randn(6, 8), torch.randn(4, 6).half()
    assert Joint(program, *inputs).run() == (factor == "number")


def test_numerics_against_fp64() -> None:
    """Sums beyond FP16's range are finite, and nearer to FP64 than what they replace."""
    x, tangents = (256 * torch.rand(512, 8)).half(), (1 + torch.rand(512, 6)).half()
    _, before, after = results(with_a_bias, leaf(6, 8), leaf(6), x, 16 * tangents)
    expected = (16 * tangents.double()).T @ x.double(), (16 * tangents.double()).sum(0)
    assert before[0].isinf().all()
    for wide, exact, rounded in zip(after, expected, before, strict=True):
        torch.testing.assert_close(wide.double(), exact, rtol=1e-6, atol=0)
        assert ((wide - exact).abs() <= (rounded - exact).abs()).all()


def widened_in(model: nn.Module, x: torch.Tensor, **options: Any) -> tuple[bool, fx.Graph]:
    """The graph that Inductor hands over, with the scale, the checks and the bookkeeping."""
    found: list[tuple[bool, fx.Graph]] = []

    def look(graph: fx.Graph) -> None:
        copy = fx.Graph()
        copy.output(copy.graph_copy(graph, {}))
        found.append((widen_weight_gradients(on("cuda", copy)), copy))

    hook = {"joint_custom_post_pass": look}
    mpcompile(model, dtype=torch.float16, options=hook, **options)(x).sum().backward()
    (only,) = found
    return only


@pytest.mark.slow("compiles by Inductor, or a deep model")
def test_every_parameter_of_a_compiled_model() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
    changed, graph = widened_in(net, torch.randn(5, 8))
    assert changed
    assert [node.target for node in graph.nodes].count(aten.mm.dtype) == 2
    sums = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert sum("dtype" in n.kwargs for n in sums) == 2


@pytest.mark.slow("compiles by Inductor, or a deep model")
def test_every_padded_parameter_of_a_compiled_model() -> None:
    net = nn.Sequential(nn.Linear(13, 21), nn.GELU(), nn.Linear(21, 3))
    _, graph = widened_in(net, torch.randn(8, 13), pad="always")
    pads = graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    cuts = [n.meta["val"].dtype for n in pads if min(n.args[1]) < 0]
    assert cuts == [torch.float32] * 4
