"""The step passes over gradients: unscale_, measure_, check_ and clip_gradients, find_overflows,
agree_on_ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from steps import LOW, STATIC, StepStage

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.ir.step import Gradient, Ranks
from mpcompile.optim.pipeline import StepPass
from mpcompile.passes.step.agree_on_ranks import agree_on_ranks
from mpcompile.passes.step.check_gradients import check_gradients
from mpcompile.passes.step.clip_gradients import clip_gradients
from mpcompile.passes.step.find_overflows import find_overflows
from mpcompile.passes.step.measure_gradients import measure_gradients
from mpcompile.passes.step.widen_gradients import widen_gradients

F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize(
    ("pass_", "config"),
    [
        (widen_gradients, {}),
        (measure_gradients, {"checked": False}),
        (find_overflows, {"checked": False}),
        (agree_on_ranks, {}),
        (check_gradients, {"checked": False}),
        (clip_gradients, {}),
    ],
)
def test_nothing_to_do(pass_: StepPass, config: dict[str, Any]) -> None:
    """True gradients, none checked, one process, no norm to clip to."""
    assert StepStage(pass_, **config).leaves_alone()


# -- widen_gradients ------------------------------------------------------------------------


def test_widen_gradients() -> None:
    stage = StepStage(widen_gradients, gradients=(LOW,))
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
    stage = StepStage(measure_gradients, gradients=(LOW,), max_grad_norm=1.0)
    assert_expected_inline(
        stage.run(),
        """\
linalg_vector_norm_default: f32[] = linalg_vector_norm(grad0, 2.0, dtype=f32)
stack_default: f32[1] = stack([linalg_vector_norm_default])
linalg_vector_norm_default_1: f32[] = linalg_vector_norm(stack_default)
""",
    )


def test_measure_gradients_counts_each_element_once() -> None:
    """Where two ranks hold an element, each takes half of its square."""
    gradients = (Gradient(F32, (0,), replicas=2), Gradient(F32, (0,)))
    stage = StepStage(measure_gradients, (3,), (2,), gradients=gradients, max_grad_norm=1.0)
    assert "= mul(linalg_vector_norm_default, 0.7071067811865476)\n" in stage.run()


@pytest.mark.parametrize("foreach", [False, True])
def test_measure_gradients_of_no_elements(foreach: bool) -> None:
    """There is no largest one."""
    stage = StepStage(measure_gradients, (3,), (0, 2), foreach=foreach)
    assert "= linalg_vector_norm(grad1, 2.0, dtype=f32)\n" in stage.run()


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


def test_measure_gradients_that_are_gathered() -> None:
    """One norm for both, which counts once in the norm of all; the third has its own."""
    gradients = (LOW, LOW, Gradient(F32, (0,)))
    stage = StepStage(measure_gradients, (3,), (2, 2), (4,), gradients=gradients,
                      gathered=((0, 1),), max_grad_norm=1.0)  # fmt: skip
    assert_expected_inline(
        stage.run(),
        """\
grads0: bf16[7] = input
linalg_vector_norm_default: f32[] = linalg_vector_norm(grads0, 2.0, dtype=f32)
linalg_vector_norm_default_1: f32[] = linalg_vector_norm(grad2, 2.0, dtype=f32)
stack_default: f32[2] = stack([linalg_vector_norm_default, linalg_vector_norm_default_1])
linalg_vector_norm_default_2: f32[] = linalg_vector_norm(stack_default)
""",
    )
    first, second, third = ir.step_notes(stage.gm).norms
    assert first is second is not third


# -- find_overflows ---------------------------------------------------------------------------


def test_find_overflows() -> None:
    assert_expected_inline(
        StepStage(find_overflows).run(),
        """\
scale0_flag: i64[] = input
gt_scalar: b8[] = gt(scale0_flag, 0)
stack_default: f32[1] = stack([linalg_vector_norm_default])
isfinite_default: b8[1] = isfinite(stack_default)
all_default: b8[] = all(isfinite_default)
logical_not_default: b8[] = logical_not(all_default)
logical_or_default: b8[] = logical_or(gt_scalar, logical_not_default)
""",
    )


def test_find_overflows_of_two_models() -> None:
    """Each scale looks at its own; a parameter that both models read counts for both."""
    gradients = (Gradient(F32, (0,)), Gradient(F32, (1,)), Gradient(F32, (0, 1)))
    stage = StepStage(find_overflows, (3,), (2,), (1,), gradients=gradients,
                      scales=(STATIC, STATIC))  # fmt: skip
    assert_expected_inline(
        stage.run(),
        """\
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
""",
    )


def test_find_overflows_of_gathered_gradients() -> None:
    """Each norm is looked at once, and by the scales of its own gradients only."""
    two = (Gradient(F32, (0,)), Gradient(F32, (0,)), Gradient(F32, (1,)), Gradient(F32, (1,)))
    stage = StepStage(find_overflows, (3,), (2,), (4,), (5,), scales=(STATIC, STATIC),
                      gradients=two, gathered=((0, 1),))  # fmt: skip
    new = stage.run()
    assert "= stack([linalg_vector_norm_default])\n" in new
    assert "= stack([linalg_vector_norm_default_1, linalg_vector_norm_default_2])\n" in new


# -- agree_on_ranks ---------------------------------------------------------------------------

distributed = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@distributed
def test_agree_on_ranks() -> None:
    ranks = Ranks(("0", "1"), "cpu")  # a sum over the first group, then over the second
    stage = StepStage(agree_on_ranks, max_grad_norm=0.5, ranks=ranks)
    assert_expected_inline(
        stage.run(),
        """\
_to_copy_default: f64[] = _to_copy(logical_or_default, dtype=f64)
_to_copy_default_1: f64[] = _to_copy(linalg_vector_norm_default_1, dtype=f64)
mul_tensor_1: f64[] = mul(_to_copy_default_1, _to_copy_default_1)
stack_default_2: f64[2] = stack([_to_copy_default, mul_tensor_1])
all_reduce_default: f64[2] = _c10d_functional::all_reduce(stack_default_2, 'sum', '0')
wait_tensor_default: f64[2] = _c10d_functional::wait_tensor(all_reduce_default)
all_reduce_default_1: f64[2] = _c10d_functional::all_reduce(wait_tensor_default, 'sum', '1')
wait_tensor_default_1: f64[2] = _c10d_functional::wait_tensor(all_reduce_default_1)
select_int: f64[] = select(wait_tensor_default_1, 0, 0)
select_int_1: f64[] = select(wait_tensor_default_1, 0, 1)
sqrt_default: f64[] = sqrt(select_int_1)
_to_copy_default_2: f32[] = _to_copy(sqrt_default, dtype=f32)
gt_scalar_1: b8[] = gt(select_int, 0)
""",
    )


@distributed
def test_agree_on_ranks_only_on_what_is_decided() -> None:
    ranks = Ranks(("0",), "cpu")
    assert "f64[1] = stack(" in StepStage(agree_on_ranks, ranks=ranks).run()
    clipped = StepStage(agree_on_ranks, ranks=ranks, max_grad_norm=0.5, checked=False)
    assert "f64[1] = stack(" in clipped.run()
    assert StepStage(agree_on_ranks, ranks=ranks, checked=False).leaves_alone()


@distributed
def test_agree_on_ranks_on_the_device_that_the_group_exchanges() -> None:
    """FSDP's CPUOffloadPolicy keeps parameters on the host, and its group exchanges CUDA's."""
    text = StepStage(agree_on_ranks, ranks=Ranks(("0",), "meta")).run()
    there, back = (line for line in text.splitlines() if "device=" in line)
    assert "type='meta'" in there
    assert "type='cpu'" in back


# -- clip_gradients ---------------------------------------------------------------------------


def test_clip_gradients() -> None:
    stage = StepStage(clip_gradients, (3,), (2,), max_grad_norm=0.5)
    assert_expected_inline(
        stage.run(),
        """\
result_norm: f32[] = input
add_tensor_2: f32[] = add(linalg_vector_norm_default_2, 1e-06)
reciprocal_default: f32[] = reciprocal(add_tensor_2)
mul_tensor_2: f32[] = mul(reciprocal_default, 0.5)
clamp_max_default: f32[] = clamp_max(mul_tensor_2, 1.0)
mul_tensor_3: f32[3] = mul(grad0, clamp_max_default)
mul_tensor_4: f32[2] = mul(grad1, clamp_max_default)
mul_tensor: f32[3] = mul(mul_tensor_3, neg)
mul_tensor_1: f32[2] = mul(mul_tensor_4, neg)
copy__default_1: f32[] = copy_(result_norm, linalg_vector_norm_default_2)
- mul_tensor: f32[3] = mul(grad0, neg)
- mul_tensor_1: f32[2] = mul(grad1, neg)
""",
    )


def test_clip_gradients_keeps_the_dtype_of_a_number() -> None:
    """A 0-d tensor times a wider 0-d tensor would be wider; the step was traced without that."""
    stage = StepStage(clip_gradients, (), (3,), max_grad_norm=0.5,
                      gradients=(Gradient(F32, (0,)), Gradient(F64, (0,))))  # fmt: skip
    stage.run()
    updates = [n for n in stage.gm.graph.nodes if any(i.name == "neg" for i in n.all_input_nodes)]
    (update,) = (n for n in updates if n.target is aten.mul.Tensor and ir.value(n).ndim == 0)
    assert ir.value(update.args[0]).shape == ()
    assert ir.dtype(update.args[0]) is F32
