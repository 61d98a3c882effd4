"""The passes over an optimizer's step."""

import pytest
import torch
from expecttest import assert_expected_inline
from steps import LOW, StepStage, adam

from mpcompile import ir
from mpcompile.errors import CannotRewrite
from mpcompile.ir import aten
from mpcompile.ir.step_config import CopyLayout, Gradient
from mpcompile.passes.step.reads import lift_numbers, take_gradients
from mpcompile.passes.step.writes import predicate_writes, write_copies

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


# -- take_gradients ---------------------------------------------------------------------------


def test_gradients_are_clipped() -> None:
    stage = StepStage(take_gradients, (3,), (2,), max_grad_norm=0.5)
    assert_expected_inline(
        stage.run(),
        """\
factor: f32[] = input
mul_tensor_2: f32[3] = mul(grad0, factor)
mul_tensor_3: f32[2] = mul(grad1, factor)
mul_tensor: f32[3] = mul(mul_tensor_2, neg)
mul_tensor_1: f32[2] = mul(mul_tensor_3, neg_1)
- mul_tensor: f32[3] = mul(grad0, neg)
- mul_tensor_1: f32[2] = mul(grad1, neg_1)
""",
    )


def test_a_clipped_gradient_keeps_the_dtype_of_a_number() -> None:
    """A 0-d tensor times a wider 0-d tensor would be wider; the step was traced without that."""
    f32, f64 = torch.float32, torch.float64
    gradients = (Gradient(f32, (0,)), Gradient(f64, (0,)))
    stage = StepStage(take_gradients, (), (3,), max_grad_norm=0.5, gradients=gradients)
    stage.run()
    updates = [n for n in stage.gm.graph.nodes if any(i.name == "neg" for i in n.all_input_nodes)]
    (update,) = (n for n in updates if n.target is aten.mul.Tensor and ir.value(n).ndim == 0)
    assert ir.dtype(update.args[0]) is f32


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_low_gradient_is_widened_before_all_else(clip: float | None) -> None:
    stage = StepStage(take_gradients, gradients=(LOW,), max_grad_norm=clip)
    clipped = "mul_tensor_1: f32[3] = mul(_to_copy_default, factor)"
    assert stage.run().splitlines() == [
        "grad0: bf16[3] = input",
        *(["factor: f32[] = input"] if clip else []),
        "_to_copy_default: f32[3] = _to_copy(grad0, dtype=f32)",
        *([clipped] if clip else []),
        f"mul_tensor: f32[3] = mul({'mul_tensor_1' if clip else '_to_copy_default'}, neg)",
        "- grad0: f32[3] = input",
        "- mul_tensor: f32[3] = mul(grad0, neg)",
    ]


def test_gradients_that_are_left_alone() -> None:
    assert StepStage(take_gradients).leaves_alone()


# -- predicate_writes -------------------------------------------------------------------------


def test_predicate_writes() -> None:
    """The parameter, both moments and the counter."""
    assert_expected_inline(
        StepStage(predicate_writes, make=adam).run(),
        """\
result_skipped: b8[] = input
where_self: f32[3] = where(result_skipped, param0, add_tensor)
copy_: f32[3] = copy_(param0, where_self)
where_self_1: f32[] = where(result_skipped, state0_step, copy)
copy__1: f32[] = copy_(state0_step, where_self_1)
where_self_2: f32[3] = where(result_skipped, state0_exp_avg, lerp)
copy__2: f32[3] = copy_(state0_exp_avg, where_self_2)
where_self_3: f32[3] = where(result_skipped, state0_exp_avg_sq, addcmul)
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
    stage = StepStage(write_copies, (3,), (2,), copies=(CopyLayout(torch.float16, (1,)), None))
    assert_expected_inline(
        stage.run(),
        """\
copy0: f16[3] = input
_to_copy_default: f16[3] = _to_copy(where_self, dtype=f16)
copy__default: f16[3] = copy_(copy0, _to_copy_default)
""",
    )


def test_write_copies_without_copies() -> None:
    assert StepStage(write_copies, (3,), (2,)).leaves_alone()
