"""The step passes over the update and the writes: lift_numbers, share_numbers, predicate_writes,
write_copies and move_scale.
"""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from steps import DYNAMIC, StepStage, adam

from mpcompile.errors import CannotRewrite
from mpcompile.ir import aten
from mpcompile.ir.step import CopyLayout
from mpcompile.passes.step.lift_numbers import lift_numbers
from mpcompile.passes.step.move_scale import move_scale
from mpcompile.passes.step.predicate_writes import predicate_writes
from mpcompile.passes.step.share_numbers import share_numbers
from mpcompile.passes.step.write_copies import write_copies

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


# -- share_numbers ----------------------------------------------------------------------------


def test_share_numbers() -> None:
    """One number of the learning rate for both; nothing is shared of what is not a number."""
    assert_expected_inline(
        StepStage(share_numbers, (3,), (3,)).run(),
        """\
mul_tensor_1: f32[3] = mul(grad1, neg)
- neg_1: f64[] = neg(lr0)
- mul_tensor_1: f32[3] = mul(grad1, neg_1)
""",
    )


def test_share_numbers_that_follow_from_other_numbers_alone() -> None:
    """A counter belongs to its parameter, and so does what follows from it."""
    stage = StepStage(share_numbers, (3,), (2,), make=lambda p: torch.optim.AdamW(p, lr=0.1))
    before = stage.text.count("pow(")
    stage.run()
    assert stage.text.count("pow(") == before
    assert stage.text.count("mul(lr0, 0.01)") == 1
    assert stage.text.count("_to_copy(state1_step") == 1


def test_share_numbers_only_where_the_arguments_are_equal() -> None:
    class Slower(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for i, p in enumerate(group["params"]):
                    p.sub_(p.grad * (group["lr"] / (i + 1)))

    assert StepStage(share_numbers, (3,), (3,), make=lambda p: Slower(p, lr=0.1)).leaves_alone()


def test_share_numbers_draws_each_random_number() -> None:
    class Noisy(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad * aten.bernoulli.p(group["lr"], 0.5))

    assert StepStage(share_numbers, (3,), (3,), make=lambda p: Noisy(p, lr=0.1)).leaves_alone()


# -- predicate_writes -------------------------------------------------------------------------


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


@pytest.mark.parametrize("checked", [False, True])
def test_predicate_writes_of_parameters_without_a_gradient(checked: bool) -> None:
    """Each has a flag of its own, and a skipped step is one for all."""
    stage = StepStage(predicate_writes, (3,), (2,), checked=checked, optional=True)
    flags = ("absent0", "absent1")
    conditions = ("logical_or_default_1", "logical_or_default_2") if checked else flags
    lines = stage.run().splitlines()
    for i, condition in enumerate(conditions):
        (kept,) = (line for line in lines if f"= where({condition}, param{i}, " in line)
        name = kept.split(":")[0]
        assert any(line.endswith(f"= copy_(param{i}, {name})") for line in lines)
        joined = f"{condition}: b8[] = logical_or(logical_or_default, absent{i})"
        assert (joined in lines) is checked


def test_predicate_writes_where_nothing_is_skipped() -> None:
    assert StepStage(predicate_writes, make=adam, checked=False).leaves_alone()


# -- write_copies -----------------------------------------------------------------------------


def test_write_copies() -> None:
    stage = StepStage(write_copies, (3,), (2,), copies=(CopyLayout(torch.float16, (1,)), None))
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
