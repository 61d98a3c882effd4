"""The step passes over gradients: unscale_, measure_, check_ and clip_gradients."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from steps import SCALED, STATIC, StepStage

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.step import Gradient
from mpcompile.passes.step.check_gradients import check_gradients
from mpcompile.passes.step.clip_gradients import clip_gradients
from mpcompile.passes.step.measure_gradients import measure_gradients
from mpcompile.passes.step.unscale_gradients import unscale_gradients

F32, F64 = torch.float32, torch.float64


# -- unscale_gradients ------------------------------------------------------------------------


def test_unscale_gradients() -> None:
    stage = StepStage(unscale_gradients, gradients=(SCALED,))
    assert_expected_inline(
        stage.run(),
        """\
grad0: f16[3] = input
scale0_used: f32[] = input
_to_copy_default: f32[3] = _to_copy(grad0, dtype=f32)
reciprocal_default: f32[] = reciprocal(scale0_used)
mul_tensor_1: f32[3] = mul(_to_copy_default, reciprocal_default)
mul_tensor: f32[3] = mul(mul_tensor_1, neg)
- grad0: f32[3] = input
- mul_tensor: f32[3] = mul(grad0, neg)
""",
    )


def test_unscale_gradients_divides_by_one_number() -> None:
    stage = StepStage(unscale_gradients, (3,), (2,), gradients=(SCALED, SCALED))
    stage.run()
    assert stage.text.count("reciprocal(") == 1


def test_unscale_gradients_only_widens_bf16() -> None:
    stage = StepStage(unscale_gradients, gradients=(Gradient(torch.bfloat16, (0,)),))
    assert_expected_inline(
        stage.run(),
        """\
grad0: bf16[3] = input
_to_copy_default: f32[3] = _to_copy(grad0, dtype=f32)
mul_tensor: f32[3] = mul(_to_copy_default, neg)
- grad0: f32[3] = input
- mul_tensor: f32[3] = mul(grad0, neg)
""",
    )


def test_unscale_gradients_leaves_true_ones_alone() -> None:
    assert StepStage(unscale_gradients).leaves_alone()


# -- measure_gradients ------------------------------------------------------------------------


def test_measure_gradients() -> None:
    assert_expected_inline(
        StepStage(measure_gradients, (3,), (2,)).run(),
        """\
linalg_vector_norm_default: f32[] = linalg_vector_norm(grad0, inf, dtype=f32)
linalg_vector_norm_default_1: f32[] = linalg_vector_norm(grad1, inf, dtype=f32)
""",
    )


def test_measure_gradients_reads_what_is_stored() -> None:
    """Half the bytes, and the 2-norm where it is needed anyhow."""
    stage = StepStage(measure_gradients, gradients=(SCALED,), max_grad_norm=1.0)
    assert_expected_inline(
        stage.run(),
        """\
linalg_vector_norm_default: f32[] = linalg_vector_norm(grad0, 2.0, dtype=f32)
""",
    )


def test_measure_gradients_in_one_operator() -> None:
    stage = StepStage(measure_gradients, (3,), (2,), foreach=True)
    assert_expected_inline(
        stage.run(),
        """\
_foreach_norm_scalar: (f32[], f32[]) = _foreach_norm([grad0, grad1], inf, f32)
getitem_4: f32[] = getitem(_foreach_norm_scalar, 0)
getitem_5: f32[] = getitem(_foreach_norm_scalar, 1)
""",
    )


def test_measure_gradients_has_nothing_to_measure() -> None:
    assert StepStage(measure_gradients, checked=False).leaves_alone()
    assert not StepStage(measure_gradients, checked=False, max_grad_norm=1.0).leaves_alone()


# -- check_gradients --------------------------------------------------------------------------


def test_check_gradients() -> None:
    assert_expected_inline(
        StepStage(check_gradients).run(),
        """\
result_skipped: b8[] = input
scale0_flag: i64[] = input
gt_scalar: b8[] = gt(scale0_flag, 0)
stack_default: f32[1] = stack([linalg_vector_norm_default])
isfinite_default: b8[1] = isfinite(stack_default)
all_default: b8[] = all(isfinite_default)
logical_not_default: b8[] = logical_not(all_default)
logical_or_default: b8[] = logical_or(gt_scalar, logical_not_default)
copy__default: b8[] = copy_(result_skipped, logical_or_default)
""",
    )


def test_check_gradients_of_two_models() -> None:
    """Each scale looks at its own; a parameter that both models read counts for both."""
    gradients = (Gradient(F32, (0,)), Gradient(F32, (1,)), Gradient(F32, (0, 1)))
    stage = StepStage(check_gradients, (3,), (2,), (1,), gradients=gradients,
                      scales=(STATIC, STATIC))  # fmt: skip
    assert_expected_inline(
        stage.run(),
        """\
result_skipped: b8[] = input
scale0_flag: i64[] = input
scale1_flag: i64[] = input
gt_scalar: b8[] = gt(scale0_flag, 0)
stack_default: f32[2] = stack([linalg_vector_norm_default, linalg_vector_norm_default_2])
isfinite_default: b8[2] = isfinite(stack_default)
all_default: b8[] = all(isfinite_default)
logical_not_default: b8[] = logical_not(all_default)
logical_or_default: b8[] = logical_or(gt_scalar, logical_not_default)
gt_scalar_1: b8[] = gt(scale1_flag, 0)
stack_default_1: f32[2] = stack([linalg_vector_norm_default_1, linalg_vector_norm_default_2])
isfinite_default_1: b8[2] = isfinite(stack_default_1)
all_default_1: b8[] = all(isfinite_default_1)
logical_not_default_1: b8[] = logical_not(all_default_1)
logical_or_default_1: b8[] = logical_or(gt_scalar_1, logical_not_default_1)
logical_or_default_2: b8[] = logical_or(logical_or_default, logical_or_default_1)
copy__default: b8[] = copy_(result_skipped, logical_or_default_2)
""",
    )


def test_check_gradients_where_nothing_is_skipped() -> None:
    assert StepStage(check_gradients, checked=False).leaves_alone()


# -- clip_gradients ---------------------------------------------------------------------------


def test_clip_gradients() -> None:
    stage = StepStage(clip_gradients, (3,), (2,), max_grad_norm=0.5)
    assert_expected_inline(
        stage.run(),
        """\
result_norm: f32[] = input
stack_default_1: f32[2] = stack([linalg_vector_norm_default, linalg_vector_norm_default_1])
linalg_vector_norm_default_2: f32[] = linalg_vector_norm(stack_default_1)
add_tensor_2: f32[] = add(linalg_vector_norm_default_2, 1e-06)
reciprocal_default: f32[] = reciprocal(add_tensor_2)
mul_tensor_2: f32[] = mul(reciprocal_default, 0.5)
clamp_max_default: f32[] = clamp_max(mul_tensor_2, 1.0)
mul_tensor_3: f32[3] = mul(grad0, clamp_max_default)
mul_tensor_4: f32[2] = mul(grad1, clamp_max_default)
mul_tensor: f32[3] = mul(mul_tensor_3, neg)
mul_tensor_1: f32[2] = mul(mul_tensor_4, neg_1)
copy__default_1: f32[] = copy_(result_norm, linalg_vector_norm_default_2)
- mul_tensor: f32[3] = mul(grad0, neg)
- mul_tensor_1: f32[2] = mul(grad1, neg_1)
""",
    )


def test_clip_gradients_unscales_the_norms() -> None:
    stage = StepStage(clip_gradients, gradients=(SCALED,), max_grad_norm=0.5)
    assert_expected_inline(
        stage.run(),
        """\
result_norm: f32[] = input
mul_tensor_2: f32[] = mul(linalg_vector_norm_default, reciprocal_default)
stack_default_1: f32[1] = stack([mul_tensor_2])
linalg_vector_norm_default_1: f32[] = linalg_vector_norm(stack_default_1)
add_tensor_1: f32[] = add(linalg_vector_norm_default_1, 1e-06)
reciprocal_default_1: f32[] = reciprocal(add_tensor_1)
mul_tensor_3: f32[] = mul(reciprocal_default_1, 0.5)
clamp_max_default: f32[] = clamp_max(mul_tensor_3, 1.0)
mul_tensor_4: f32[3] = mul(mul_tensor_1, clamp_max_default)
mul_tensor: f32[3] = mul(mul_tensor_4, neg)
copy__default_1: f32[] = copy_(result_norm, linalg_vector_norm_default_1)
- mul_tensor: f32[3] = mul(mul_tensor_1, neg)
""",
    )


def test_clip_gradients_keeps_the_dtype_of_a_number() -> None:
    """A 0-d tensor times a wider 0-d tensor would be wider; the step was traced without that."""
    stage = StepStage(clip_gradients, (), (3,), max_grad_norm=0.5,
                      gradients=(Gradient(F32, (0,)), Gradient(F64, (0,))))  # fmt: skip
    stage.run()
    updates = [n for n in stage.gm.graph.nodes if any(i.name == "neg" for i in n.all_input_nodes)]
    (update,) = (n for n in updates if n.target is aten.mul.Tensor)
    assert ir.value(update.args[0]).shape == ()
    assert ir.dtype(update.args[0]) is F32


def test_clip_gradients_without_a_norm() -> None:
    assert StepStage(clip_gradients).leaves_alone()
