"""What stands around an optimizer's own arithmetic in the graph of its step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn

from mpcompile import ir
from mpcompile.errors import CannotRewrite
from mpcompile.ir import aten
from mpcompile.ir.step_config import SKIPPED, CopyLayout, Gradient
from mpcompile.optim.first_state import initialise_state
from mpcompile.optim.members import Member, StepConfig
from mpcompile.optim.rewrite import rewritten
from mpcompile.optim.trace import trace

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
F32 = Gradient(torch.float32, (0,))


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def step(make: Make = sgd, *tensors: torch.Tensor, **config: Any) -> fx.GraphModule:
    """The graph of a step, by default of SGD over one parameter, where nothing is skipped."""
    params = [nn.Parameter(t) for t in tensors or (torch.ones(3),)]
    optimizer = make(params)
    for p in params:
        p.grad = torch.zeros_like(p)
    members, strides = [Member(0, p) for p in params], [p.stride() for p in params]
    initialise_state(optimizer, members)
    default = {"gradients": (F32,), "copies": (None,) * len(params), "checked": False}
    traced = trace(optimizer, members, strides=strides, foreach=False)
    settings = StepConfig(**{**default, **config})  # type: ignore[arg-type]
    return rewritten(traced.graph, settings, range(len(params)))


def text(gm: fx.GraphModule) -> str:
    return ir.render(gm.graph)


def test_no_number_is_read() -> None:
    assert_expected_inline(
        text(step()),
        """\
param0: f32[3] = input
grad0: f32[3] = input
lr0: f64[] = input
neg: f64[] = neg(lr0)
mul: f32[3] = mul(grad0, neg)
add: f32[3] = add(param0, mul)
copy_: f32[3] = copy_(param0, add)
return 
""",  # noqa: W291
    )


def test_no_number_is_read_in_adam() -> None:
    found = text(step(adam))
    assert "_local_scalar_dense" not in found
    assert "div(lerp, add_1)\nmul_1: f32[3] = mul(div_2, neg)\n" in found  # for `addcdiv`


def test_what_no_tensor_can_stand_for_is_refused() -> None:
    class Odd(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.copy_(torch.full_like(p, aten._local_scalar_dense(group["lr"])))

    with pytest.raises(CannotRewrite, match="a number read from a tensor in aten::"):
        step(lambda p: Odd(p, lr=0.1))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_low_gradient_is_widened_and_clipped_before_all_else(clip: float | None) -> None:
    low = Gradient(torch.bfloat16, (0,))
    found = text(step(gradients=(low,), max_grad_norm=clip)).splitlines()
    assert found[1] == "grad0: bf16[3] = input"
    first = found.index("_to_copy: f32[3] = _to_copy(grad0, dtype=f32)")
    if clip is None:
        assert found[first + 2] == "mul: f32[3] = mul(_to_copy, neg)"
    else:
        assert found[first + 1] == "mul: f32[3] = mul(_to_copy, factor)"
        assert found[first + 3] == "mul_1: f32[3] = mul(mul, neg)"


def test_a_clipped_gradient_keeps_the_dtype_of_a_number() -> None:
    """A 0-d tensor times a wider 0-d tensor would be wider; the step was traced without that."""
    of_both = (F32, Gradient(torch.float64, (0,)))
    wide = torch.ones(3, dtype=torch.float64)
    gm = step(sgd, torch.ones(()), wide, gradients=of_both, max_grad_norm=0.5)
    updates = [n for n in gm.graph.nodes if any(i.name == "neg" for i in n.all_input_nodes)]
    (update,) = (n for n in updates if n.target is aten.mul.Tensor)
    assert ir.value(update).ndim == 0
    assert ir.dtype(update.args[0]) is torch.float32


def test_the_factor_has_the_dtype_in_which_the_whole_step_decides() -> None:
    """Also in the graph of one parameter, whose own gradient is FP32."""
    of_both = (F32, Gradient(torch.float64, (0,)))
    assert "factor: f64[] = input" in text(step(gradients=of_both, max_grad_norm=0.5))


def test_a_skipped_step_writes_what_was_there() -> None:
    """The parameter, both moments and the counter."""
    gm = step(adam, checked=True)
    writes, slots = ir.writes(gm.graph), ir.slots(gm.graph)
    state = ("step", "exp_avg", "exp_avg_sq")
    assert [t.name for _, t, _ in writes] == ["param0", *(f"state0_{key}" for key in state)]
    for _, target, kept in writes:
        assert kept.target is aten.where.self
        assert kept.args[:2] == (slots[SKIPPED], target)
        assert kept.args[2] is not target
        assert ir.mark(kept).reason == "unchanged where the step is skipped"


def test_copies_are_written_of_what_is_kept() -> None:
    low = (CopyLayout(torch.float16, (1,)), None)
    gm = step(sgd, torch.ones(3), torch.ones(2), gradients=(F32, F32), copies=low, checked=True)
    assert_expected_inline(
        "".join(f"{line}\n" for line in text(gm).splitlines() if "copy" in line),
        """\
copy0: f16[3] = input
copy_: f32[3] = copy_(param0, where)
_to_copy: f16[3] = _to_copy(where, dtype=f16)
copy__1: f16[3] = copy_(copy0, _to_copy)
copy__2: f32[2] = copy_(param1, where_1)
""",
    )


def test_a_master_follows_its_parameter_before_all_else() -> None:
    leading = CopyLayout(torch.bfloat16, (1,), leads=True)
    assert_expected_inline(
        text(step(copies=(leading,), checked=True)),
        """\
param0: f32[3] = input
grad0: f32[3] = input
lr0: f64[] = input
result_skipped: b8[] = input
copy0: bf16[3] = input
_to_copy: bf16[3] = _to_copy(param0, dtype=bf16)
eq: b8[3] = eq(_to_copy, copy0)
_to_copy_1: f32[3] = _to_copy(copy0, dtype=f32)
where: f32[3] = where(eq, param0, _to_copy_1)
neg: f64[] = neg(lr0)
mul: f32[3] = mul(grad0, neg)
add: f32[3] = add(where, mul)
where_1: f32[3] = where(result_skipped, where, add)
copy_: f32[3] = copy_(param0, where_1)
_to_copy_2: bf16[3] = _to_copy(where_1, dtype=bf16)
copy__1: bf16[3] = copy_(copy0, _to_copy_2)
return 
""",  # noqa: W291
    )
