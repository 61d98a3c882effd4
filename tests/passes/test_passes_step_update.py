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


def test_move_scale_where_nothing_is_checked() -> None:
    assert StepStage(move_scale, scales=(DYNAMIC,), checked=False).leaves_alone()
