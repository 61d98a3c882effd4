"""The passes over an optimizer step: what each adds to the text of a tiny one, what it leaves."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from steps import DYNAMIC, STATIC, StepStage
from torch import fx, nn

from mpcompile import ir
from mpcompile.errors import CannotRewrite
from mpcompile.ir import aten
from mpcompile.ir.step import CopyLayout, Gradient, StepNotes
from mpcompile.optim.pipeline import STEP_PASSES, StepPass
from mpcompile.passes.step.check_gradients import check_gradients
from mpcompile.passes.step.clip_gradients import clip_gradients
from mpcompile.passes.step.lift_numbers import lift_numbers
from mpcompile.passes.step.measure_gradients import measure_gradients
from mpcompile.passes.step.move_scale import move_scale
from mpcompile.passes.step.predicate_writes import predicate_writes
from mpcompile.passes.step.unscale_gradients import unscale_gradients
from mpcompile.passes.step.write_copies import write_copies

F16, F32, F64 = torch.float16, torch.float32, torch.float64
SCALED = Gradient(F16, (0,), scaled_by=0)


# -- lift_numbers -----------------------------------------------------------------------------


def test_lift_numbers() -> None:
    assert_expected_inline(
        StepStage(lift_numbers).run(),
        """\
mul_tensor: f32[3] = mul(grad0, neg)
add_tensor: f32[3] = add(param0, mul_tensor)
copy_: f32[3] = copy_(param0, add_tensor)
- _local_scalar_dense: SymFloat = _local_scalar_dense(neg)
- add: f32[3] = add(param0, grad0, alpha=_local_scalar_dense)
- copy_: f32[3] = copy_(param0, add)
""",
    )


def test_lift_numbers_in_adam() -> None:
    stage = StepStage(lift_numbers, make=lambda p: torch.optim.Adam(p, lr=0.1))
    assert_expected_inline(
        stage.run(),
        """\
div_tensor: f32[3] = div(lerp, add_1)
mul_tensor: f32[3] = mul(div_tensor, neg)
add_tensor: f32[3] = add(param0, mul_tensor)
copy_: f32[3] = copy_(param0, add_tensor)
- _local_scalar_dense: SymFloat = _local_scalar_dense(neg)
- addcdiv: f32[3] = addcdiv(param0, lerp, add_1, value=_local_scalar_dense)
- copy_: f32[3] = copy_(param0, addcdiv)
""",
    )


def test_lift_numbers_does_all_at_once() -> None:
    stage = StepStage(lift_numbers, (3,), (2,))
    stage.run()
    assert "_local_scalar_dense" not in stage.text
    stage.before = stage.text.splitlines()
    assert stage.leaves_alone()


def test_lift_numbers_refuses_what_it_does_not_know() -> None:
    class Odd(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.copy_(torch.full_like(p, aten._local_scalar_dense(group["lr"])))

    with pytest.raises(CannotRewrite, match="a number read from a tensor in aten::"):
        StepStage(lift_numbers, make=lambda p: Odd(p, lr=0.1)).run()


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


# -- predicate_writes -------------------------------------------------------------------------


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def test_predicate_writes() -> None:
    """The parameter, both moments and the counter; not what the step reports."""
    assert_expected_inline(
        StepStage(predicate_writes, make=adam).run(),
        """\
where_self: f32[3] = where(logical_or_default, param0, add_tensor)
copy_: f32[3] = copy_(param0, where_self)
where_self_1: f32[] = where(logical_or_default, state0_step, copy)
copy__1: f32[] = copy_(state0_step, where_self_1)
where_self_2: f32[3] = where(logical_or_default, state0_exp_avg, lerp)
copy__2: f32[3] = copy_(state0_exp_avg, where_self_2)
where_self_3: f32[3] = where(logical_or_default, state0_exp_avg_sq, addcmul)
copy__3: f32[3] = copy_(state0_exp_avg_sq, where_self_3)
- copy_: f32[3] = copy_(param0, add_tensor)
- copy__1: f32[] = copy_(state0_step, copy)
- copy__2: f32[3] = copy_(state0_exp_avg, lerp)
- copy__3: f32[3] = copy_(state0_exp_avg_sq, addcmul)
""",
    )


def test_predicate_writes_where_nothing_is_skipped() -> None:
    assert StepStage(predicate_writes, make=adam, checked=False).leaves_alone()


# -- write_copies -----------------------------------------------------------------------------


def test_write_copies() -> None:
    stage = StepStage(write_copies, (3,), (2,), copies=(CopyLayout(F16, (1,)), None))
    assert_expected_inline(
        stage.run(),
        """\
copy0: f16[3] = input
_to_copy_default: f16[3] = _to_copy(where_self, dtype=f16)
copy__default_1: f16[3] = copy_(copy0, _to_copy_default)
""",
    )


def test_write_copies_without_copies() -> None:
    assert StepStage(write_copies, (3,), (2,)).leaves_alone()


# -- move_scale -------------------------------------------------------------------------------


def test_move_scale_static() -> None:
    assert_expected_inline(
        StepStage(move_scale).run(),
        """\
scale0_skipped_steps: i64[] = input
add_tensor_1: i64[] = add(scale0_skipped_steps, logical_or_default)
copy__default_1: i64[] = copy_(scale0_skipped_steps, add_tensor_1)
""",
    )


def test_move_scale_dynamic() -> None:
    assert_expected_inline(
        StepStage(move_scale, scales=(DYNAMIC,)).run(),
        """\
scale0_first: b8[] = input
scale0_scale: f32[] = input
scale0_good_steps: i64[] = input
scale0_overflows_left: i64[] = input
scale0_skipped_steps: i64[] = input
scale0_hit: b8[] = input
scale0_floor: b8[] = input
add_tensor_1: i64[] = add(scale0_skipped_steps, logical_or_default)
sub_tensor: i64[] = sub(scale0_overflows_left, 1)
add_tensor_2: i64[] = add(scale0_good_steps, 1)
le_scalar: b8[] = le(sub_tensor, 0)
bitwise_and_tensor: b8[] = bitwise_and(logical_or_default, le_scalar)
logical_not_default_1: b8[] = logical_not(logical_or_default)
ge_scalar: b8[] = ge(add_tensor_2, 2000)
bitwise_and_tensor_1: b8[] = bitwise_and(logical_not_default_1, ge_scalar)
mul_tensor_1: f32[] = mul(scale0_scale, 0.5)
clamp_min_default: f32[] = clamp_min(mul_tensor_1, 1.0)
mul_tensor_2: f32[] = mul(scale0_scale, 2.0)
clamp_max_default: f32[] = clamp_max(mul_tensor_2, 16777216.0)
where_self_1: f32[] = where(bitwise_and_tensor_1, clamp_max_default, scale0_scale)
where_self_2: f32[] = where(bitwise_and_tensor, clamp_min_default, where_self_1)
bitwise_or_tensor: b8[] = bitwise_or(logical_or_default, bitwise_and_tensor_1)
masked_fill_scalar: i64[] = masked_fill(add_tensor_2, bitwise_or_tensor, 0)
where_self_3: i64[] = where(logical_or_default, sub_tensor, scale0_overflows_left)
bitwise_or_tensor_1: b8[] = bitwise_or(bitwise_and_tensor, bitwise_and_tensor_1)
masked_fill_scalar_1: i64[] = masked_fill(where_self_3, bitwise_or_tensor_1, 1)
logical_not_default_2: b8[] = logical_not(scale0_first)
bitwise_and_tensor_2: b8[] = bitwise_and(scale0_hit, logical_not_default_2)
logical_not_default_3: b8[] = logical_not(bitwise_and_tensor_2)
bitwise_and_tensor_3: b8[] = bitwise_and(logical_or_default, logical_not_default_3)
bitwise_or_tensor_2: b8[] = bitwise_or(scale0_first, bitwise_and_tensor_3)
where_self_4: f32[] = where(bitwise_or_tensor_2, where_self_2, scale0_scale)
where_self_5: i64[] = where(bitwise_or_tensor_2, masked_fill_scalar, scale0_good_steps)
where_self_6: i64[] = where(bitwise_or_tensor_2, masked_fill_scalar_1, scale0_overflows_left)
bitwise_or_tensor_3: b8[] = bitwise_or(logical_or_default, bitwise_and_tensor_2)
le_scalar_1: b8[] = le(scale0_scale, 1.0)
bitwise_and_tensor_4: b8[] = bitwise_and(bitwise_and_tensor_3, le_scalar_1)
bitwise_or_tensor_4: b8[] = bitwise_or(scale0_floor, bitwise_and_tensor_4)
copy__default_1: f32[] = copy_(scale0_scale, where_self_4)
copy__default_2: i64[] = copy_(scale0_good_steps, where_self_5)
copy__default_3: i64[] = copy_(scale0_overflows_left, where_self_6)
copy__default_4: i64[] = copy_(scale0_skipped_steps, add_tensor_1)
copy__default_5: b8[] = copy_(scale0_hit, bitwise_or_tensor_3)
copy__default_6: b8[] = copy_(scale0_floor, bitwise_or_tensor_4)
""",
    )


def test_move_scale_where_nothing_is_checked() -> None:
    assert StepStage(move_scale, scales=(DYNAMIC,), checked=False).leaves_alone()


# -- what passes leave for each other ---------------------------------------------------------


@pytest.mark.parametrize(
    ("pass_", "missing", "maker"),
    [
        (measure_gradients, "start", "unscale_gradients"),
        (check_gradients, "start", "unscale_gradients"),
        (clip_gradients, "start", "unscale_gradients"),
        (predicate_writes, "skip", "check_gradients"),
        (move_scale, "overflows", "check_gradients"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_pass_that_runs_too_early_says_what_must_run_before(
    pass_: StepPass, missing: str, maker: str
) -> None:
    stage = StepStage(lift_numbers, max_grad_norm=1.0)
    with pytest.raises(RuntimeError, match=f"noted '{missing}'.*: {maker} makes it"):
        pass_(stage.gm, stage.config)


@pytest.mark.parametrize("pass_", [check_gradients, clip_gradients], ids=lambda p: p.__name__)
def test_norms_are_needed_before_they_are_read(pass_: StepPass) -> None:
    stage = StepStage(measure_gradients, max_grad_norm=1.0)  # every pass before that one has run
    with pytest.raises(RuntimeError, match=r"noted 'norms'.*: measure_gradients makes it"):
        pass_(stage.gm, stage.config)


def test_every_note_names_a_pass_that_makes_it() -> None:
    """The one named, and no other."""
    made: dict[str, str] = {}
    stage = StepStage(lift_numbers, gradients=(SCALED,), max_grad_norm=1.0)
    for pass_ in STEP_PASSES:
        pass_(stage.gm, stage.config)
        for name in vars(ir.step_notes(stage.gm)):
            made.setdefault(name, pass_.__name__)
    declared = {
        name: note.maker for name, note in vars(StepNotes).items() if hasattr(note, "maker")
    }
    assert made == declared


# -- all of them ------------------------------------------------------------------------------


def test_every_write_of_a_whole_step() -> None:
    stage = StepStage(move_scale, make=adam, gradients=(SCALED,), copies=(CopyLayout(F16, (1,)),),
                      scales=(DYNAMIC,), max_grad_norm=1.0)  # fmt: skip
    stage.run()
    written = [n.args[0].name for n in _writes(stage.gm.graph)]
    assert sorted(written) == [
        "copy0", "param0", "result_norm", "result_skipped", "scale0_floor", "scale0_good_steps",
        "scale0_hit", "scale0_overflows_left", "scale0_scale", "scale0_skipped_steps",
        "state0_exp_avg", "state0_exp_avg_sq", "state0_step",
    ]  # fmt: skip


def _writes(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=aten.copy_.default))
