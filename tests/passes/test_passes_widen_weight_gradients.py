"""widen_weight_gradients: what leaves the graph leaves the GEMM in FP32; nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from joint_graphs import Joint, weight

from mpcompile.ir import aten


def linear(w: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, tangents: torch.Tensor) -> Any:
    y = F.linear(x, w.half())
    (grad,) = torch.autograd.grad(y, w, tangents)
    return y, grad * scale.reciprocal()


def linear_inputs() -> tuple[torch.Tensor, ...]:
    return weight(6, 8), torch.randn(4, 8).half(), torch.tensor(2.0), torch.randn(4, 6).half()


def test_the_product_is_computed_in_fp32() -> None:
    joint = Joint(linear, *linear_inputs())
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
mm_1: f16[6, 8] = mm(permute_1, x_1)
permute_2: f16[8, 6] = permute(mm_1, [1, 0])
permute_3: f16[6, 8] = permute(permute_2, [1, 0])
convert_element_type_5: f32[6, 8] = cast(permute_3, f32)
reciprocal: f32[] = reciprocal(scale_1)
mul: f32[6, 8] = mul(convert_element_type_5, reciprocal)
return mm, mul
""",
    )
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


def test_bfloat16() -> None:
    def program(w: torch.Tensor, x: torch.Tensor, tangents: torch.Tensor) -> Any:
        return torch.autograd.grad(F.linear(x, w.bfloat16()), w, tangents)

    bf16 = torch.bfloat16
    joint = Joint(program, weight(6, 8), torch.randn(4, 8).to(bf16), torch.randn(4, 6).to(bf16))
    joint.run_twice()
    assert "mm_1: f32[6, 8] = mm(permute_1, x_1, f32)" in joint.text


def test_symbolic_sizes() -> None:
    joint = Joint(linear, *linear_inputs(), tracing_mode="symbolic")
    joint.run_twice()
    assert aten.mm.dtype in joint.targets


def test_batched_product_and_views() -> None:
    """A weight for each expert, stored transposed and flat."""

    def program(w: torch.Tensor, x: torch.Tensor, tangents: torch.Tensor) -> Any:
        experts = w.half().view(3, 5, 4).transpose(1, 2)
        return torch.autograd.grad(torch.bmm(x, experts), w, tangents)

    joint = Joint(program, weight(15, 4), torch.randn(3, 7, 4).half(), torch.randn(3, 7, 5).half())
    joint.run_twice()
    assert_expected_inline(
        joint.text,
        """\
w_1: f32[15, 4] = input
x_1: f16[3, 7, 4] = input
tangents_1: f16[3, 7, 5] = input
permute_1: f16[3, 4, 7] = permute(x_1, [0, 2, 1])
bmm_1: f32[3, 4, 5] = bmm(permute_1, tangents_1, f32)
permute_2: f32[3, 5, 4] = permute(bmm_1, [0, 2, 1])
clone: f32[3, 5, 4] = clone(permute_2, memory_format=torch.contiguous_format)
view_1: f32[15, 4] = view(clone, [15, 4])
return view_1
""",
    )


def test_bias() -> None:
    def program(w: torch.Tensor, b: torch.Tensor, x: torch.Tensor, tangents: torch.Tensor) -> Any:
        return torch.autograd.grad(F.linear(x, w.half(), b.half()), (w, b), tangents)

    inputs = weight(6, 8), weight(6), torch.randn(2, 4, 8).half(), torch.randn(2, 4, 6).half()
    joint = Joint(program, *inputs)
    joint.run_twice()
    assert_expected_inline(
        joint.text,
        """\
w_1: f32[6, 8] = input
b_1: f32[6] = input
x_1: f16[2, 4, 8] = input
tangents_1: f16[2, 4, 6] = input
view: f16[8, 8] = view(x_1, [8, 8])
view_2: f16[8, 6] = view(tangents_1, [8, 6])
permute_1: f16[6, 8] = permute(view_2, [1, 0])
mm: f32[6, 8] = mm(permute_1, view, f32)
permute_2: f32[8, 6] = permute(mm, [1, 0])
sum_1: f32[1, 6] = sum(view_2, [0], True, dtype=f32)
view_3: f32[6] = view(sum_1, [6])
permute_3: f32[6, 8] = permute(permute_2, [1, 0])
return permute_3, view_3
""",
    )


def test_a_padded_weight() -> None:
    """What is cut off its gradient is a negative pad."""

    def program(w: torch.Tensor, b: torch.Tensor, x: torch.Tensor, tangents: torch.Tensor) -> Any:
        y = F.linear(x, F.pad(w.half(), [0, 1, 0, 2]), F.pad(b.half(), [0, 2]))
        return torch.autograd.grad(y, (w, b), tangents)

    inputs = weight(6, 7), weight(6), torch.randn(4, 8).half(), torch.randn(4, 8).half()
    joint = Joint(program, *inputs)
    joint.run_twice()
    assert_expected_inline(
        joint.text,
        """\
w_1: f32[6, 7] = input
b_1: f32[6] = input
x_1: f16[4, 8] = input
tangents_1: f16[4, 8] = input
permute_1: f16[8, 4] = permute(tangents_1, [1, 0])
mm: f32[8, 8] = mm(permute_1, x_1, f32)
permute_2: f32[8, 8] = permute(mm, [1, 0])
sum_1: f32[1, 8] = sum(tangents_1, [0], True, dtype=f32)
view: f32[8] = view(sum_1, [8])
permute_3: f32[8, 8] = permute(permute_2, [1, 0])
constant_pad_nd_2: f32[6] = constant_pad_nd(view, [0, -2])
constant_pad_nd_3: f32[6, 7] = constant_pad_nd(permute_3, [0, -1, 0, -2])
return constant_pad_nd_3, constant_pad_nd_2
""",
    )


def test_a_weight_used_twice() -> None:
    """The sum over its uses is in FP32 too; the gradient between them stays as it was."""

    def program(w: torch.Tensor, x: torch.Tensor, tangents: torch.Tensor) -> Any:
        low = w.half()
        return torch.autograd.grad(F.linear(F.linear(x, low), low), w, tangents)

    joint = Joint(program, weight(8, 8), torch.randn(4, 8).half(), torch.randn(4, 8).half())
    joint.run_twice()
    assert_expected_inline(
        joint.text,
        """\
w_1: f32[8, 8] = input
x_1: f16[4, 8] = input
tangents_1: f16[4, 8] = input
convert_element_type: f16[8, 8] = cast(w_1, f16)
permute: f16[8, 8] = permute(convert_element_type, [1, 0])
mm: f16[4, 8] = mm(x_1, permute)
permute_1: f16[8, 8] = permute(convert_element_type, [1, 0])
permute_2: f16[8, 4] = permute(tangents_1, [1, 0])
mm_2: f32[8, 8] = mm(permute_2, mm, f32)
permute_3: f32[8, 8] = permute(mm_2, [1, 0])
permute_4: f16[8, 8] = permute(permute_1, [1, 0])
mm_3: f16[4, 8] = mm(tangents_1, permute_4)
permute_5: f32[8, 8] = permute(permute_3, [1, 0])
permute_6: f16[8, 4] = permute(mm_3, [1, 0])
mm_4: f32[8, 8] = mm(permute_6, x_1, f32)
permute_7: f32[8, 8] = permute(mm_4, [1, 0])
permute_8: f32[8, 8] = permute(permute_7, [1, 0])
add: f32[8, 8] = add(permute_5, permute_8)
return add
""",
    )


def test_what_has_no_fp32_twin_is_cast_where_it_flows_in() -> None:
    def program(w: torch.Tensor, x: torch.Tensor, tangents: torch.Tensor) -> Any:
        low = w.half()
        return torch.autograd.grad(F.linear(x, low) + low.tanh().sum(), w, tangents)

    joint = Joint(program, weight(6, 8), torch.randn(4, 8).half(), torch.randn(4, 6).half())
    joint.run_twice()
    assert_expected_inline(
        joint.text,
        """\
w_1: f32[6, 8] = input
x_1: f16[4, 8] = input
tangents_1: f16[4, 6] = input
convert_element_type: f16[6, 8] = cast(w_1, f16)
tanh: f16[6, 8] = tanh(convert_element_type)
alias: f16[6, 8] = alias(tanh)
sum_2: f16[] = sum(tangents_1)
expand: f16[6, 8] = expand(sum_2, [6, 8])
alias_1: f16[6, 8] = alias(alias)
convert_element_type_3: f32[6, 8] = cast(expand, f32)
convert_element_type_4: f32[6, 8] = cast(alias_1, f32)
mul: f32[6, 8] = mul(convert_element_type_4, convert_element_type_4)
sub: f32[6, 8] = sub(1, mul)
mul_1: f32[6, 8] = mul(convert_element_type_3, sub)
convert_element_type_5: f16[6, 8] = cast(mul_1, f16)
permute_1: f16[6, 4] = permute(tangents_1, [1, 0])
mm_1: f32[6, 8] = mm(permute_1, x_1, f32)
permute_2: f32[8, 6] = permute(mm_1, [1, 0])
permute_3: f32[6, 8] = permute(permute_2, [1, 0])
convert_element_type_default: f32[6, 8] = cast(convert_element_type_5, f32)
add_1: f32[6, 8] = add(convert_element_type_default, permute_3)
return add_1
""",
    )


def test_a_second_reader_keeps_the_product() -> None:
    def program(w: torch.Tensor, x: torch.Tensor, tangents: torch.Tensor) -> Any:
        (grad,) = torch.autograd.grad(F.linear(x, low := w.half()), low, tangents)
        return grad.float(), grad

    joint = Joint(program, weight(6, 8), torch.randn(4, 8).half(), torch.randn(4, 6).half())
    assert not joint.run()


def test_a_second_reader_of_a_view_keeps_it_too() -> None:
    def program(w: torch.Tensor, x: torch.Tensor, tangents: torch.Tensor) -> Any:
        (grad,) = torch.autograd.grad(F.linear(x, low := w.half()), low, tangents)
        flat = grad.view(-1)
        return flat.float(), flat

    joint = Joint(program, weight(6, 8), torch.randn(4, 8).half(), torch.randn(4, 6).half())
    assert not joint.run()


def test_a_gradient_that_stays_in_the_graph_keeps_its_dtype() -> None:
    """Between two layers it is cast up for a normalisation, not for a parameter."""

    def program(w: torch.Tensor, v: torch.Tensor, x: torch.Tensor, tangents: torch.Tensor) -> Any:
        h = F.layer_norm(F.linear(x, w.half()).float(), (6,)).half()
        return torch.autograd.grad(F.linear(h, v.half()), (w, v), tangents)

    inputs = weight(6, 8), weight(3, 6), torch.randn(4, 8).half(), torch.randn(4, 3).half()
    joint = Joint(program, *inputs)
    joint.run_twice()
    assert joint.targets.count(aten.mm.dtype) == 2
    assert joint.targets.count(aten.mm.default) == 2  # forward, and the gradient of h


def test_the_forward_keeps_its_dtype() -> None:
    def program(w: torch.Tensor, x: torch.Tensor) -> Any:
        return (torch.mm(x, w.half()).float(),)

    assert not Joint(program, weight(8, 6), torch.randn(4, 8).half()).run()


def test_products_in_fp32_are_none_of_ours() -> None:
    def program(w: torch.Tensor, x: torch.Tensor, tangents: torch.Tensor) -> Any:
        return torch.autograd.grad(F.linear(x, w), w, tangents)

    assert not Joint(program, weight(6, 8), torch.randn(4, 8), torch.randn(4, 6)).run()


@pytest.mark.parametrize("factor", ["number", "tensor"])
def test_only_a_product_with_one_number_hands_a_gradient_on(factor: str) -> None:
    def program(w: torch.Tensor, x: torch.Tensor, m: torch.Tensor, tangents: torch.Tensor) -> Any:
        (grad,) = torch.autograd.grad(F.linear(x, w.half()), w, tangents)
        return (grad * (0.5 if factor == "number" else m),)

    inputs = weight(6, 8), torch.randn(4, 8).half(), torch.randn(6, 8), torch.randn(4, 6).half()
    assert Joint(program, *inputs).run() == (factor == "number")
