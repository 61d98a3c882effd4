"""gather_hooks: a hook on a value sees the gradients of all its uses, casts between them or not.
And outline: checkpointed bodies go back into the operator that AOTAutograd recomputes.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, check, fallback_reason, leaf
from graphs import Stage, ran_twice
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from versions import since

from mpcompile.errors import CannotRewrite
from mpcompile.passes.graph.higher_order import gather_hooks, outline

# -- gather_hooks ----------------------------------------------------------------------------------


def clip(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


def read_before(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    before = h + 1
    h.register_hook(clip)
    return torch.atan2(h, before.abs() + 0.5)


def read_before_as_a_part(x: Tensor, w: Tensor) -> Any:
    left, right = (x @ w).chunk(2, 1)
    before = left + 1
    left.register_hook(clip)
    return torch.atan2(left, before.abs() + 0.5), right


def twice(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    h.register_hook(clip)
    between = h.sin()
    h.register_hook(lambda gradient: gradient * 2)
    return between, h.cos()


def written_afterwards(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    before = h + 1
    h.register_hook(clip)
    h.mul_(2)
    return before, h


def written_before(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    before = h + 3
    h.mul_(2)
    between = h + 1
    h.register_hook(clip)
    return before, between, h


HOOKS = since("2.13", "Dynamo itself takes hooks apart, and loses some of their gradients")
PROGRAMS = [
    read_before, read_before_as_a_part, pytest.param(twice, marks=HOOKS),
    pytest.param(written_afterwards, marks=HOOKS), pytest.param(written_before, marks=HOOKS),
]  # fmt: skip


@HOOKS
def test_applies() -> None:
    stage = ran_twice(gather_hooks, read_before, leaf(8, 16), leaf(16, 16))
    stage.expect_text("""\
x: f32[8, 16] = input
w: f32[16, 16] = input
matmul: f32[8, 16] = matmul(x, w)
body_0 = self.body_0
register_hook: f32[8, 16] = higher_order::register_hook(matmul, body_0)
add: f32[8, 16] = add(register_hook, 1)
abs_1: f32[8, 16] = abs(add)
add_1: f32[8, 16] = add(abs_1, 0.5)
atan2: f32[8, 16] = atan2(register_hook, add_1)
return atan2

body_0:
gradient: NoneType = input
clamp: NoneType = clamp(gradient, -0.01, 0.01)
return clamp
""")


def test_nothing_to_do() -> None:
    def after(x: Tensor) -> Tensor:
        h = x.sin()
        h.register_hook(clip)
        return h.cos()

    assert not Stage(gather_hooks, after, leaf(8, 16)).run()
    assert not Stage(gather_hooks, lambda x: x.sin(), leaf(8, 16)).run()


@LEVELS
@pytest.mark.parametrize("scale", ["dynamic", "none"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients(program: Any, level: str, scale: str) -> None:
    check(program, leaf(8, 16), leaf(16, 16), level=level, loss_scale=scale)


def with_a_value_of_its_own(x: Tensor, w: Tensor) -> Any:
    h = x @ w
    before = h + 1
    h.register_hook(lambda gradient: gradient * x[0, 0].detach())
    return before, h


@HOOKS
def test_what_cannot_be_moved_is_left_alone() -> None:
    reason = fallback_reason(with_a_value_of_its_own, leaf(8, 16), leaf(16, 16))
    assert "which was read before" in reason


# -- outline ---------------------------------------------------------------------------------------


def test_a_checkpoint() -> None:
    """The weight's cast stands outside: it is no activation. What the body made stands inside."""

    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        return checkpoint(lambda y: F.linear(y.cos(), w).exp(), x, use_reentrant=False) + x

    stage = ran_twice(outline, program, leaf(3, 4), leaf(4, 4))
    stage.expect_text("""\
x: f32[3, 4] = input
w: f32[4, 4] = input
w_f16: f16[4, 4] = to(w, f16)
checkpoint_body_0 = self.checkpoint_body_0
checkpoint: (f32[3, 4]) = checkpoint(checkpoint_body_0, x, w_f16, use_reentrant=False)
getitem: f32[3, 4] = getitem(checkpoint, 0)
add: f32[3, 4] = add(getitem, x)
return add

checkpoint_body_0:
x: f32[3, 4] = input
w_f16: f16[4, 4] = input
cos: f32[3, 4] = cos(x)
cos_f16: f16[3, 4] = to(cos, f16)
linear: f16[3, 4] = linear(cos_f16, w_f16)
linear_f32: f32[3, 4] = to(linear, f32)
exp: f32[3, 4] = exp(linear_f32)
return exp
""")


def test_a_graph_without_checkpoints_is_left_alone() -> None:
    assert not Stage(outline, F.linear, leaf(3, 4), leaf(4, 4)).run()


def test_interleaved_code_is_refused() -> None:
    """No pass of ours does it; if one did, folding would change the order of evaluation."""

    def program(x: torch.Tensor) -> Any:
        def body(y: torch.Tensor) -> torch.Tensor:
            return y.sin().cos()

        return checkpoint(body, x, use_reentrant=False).exp()

    stage = Stage(outline, program, leaf(2))
    with stage.gm.graph.inserting_after(stage.node("sin")):
        stranger = stage.gm.graph.call_function(torch.ops.aten.neg.default, (stage.node("sin"),))
    stage.node("cos").replace_input_with(stage.node("sin"), stranger)
    with pytest.raises(CannotRewrite, match="interleaved with code outside it"):
        outline(stage.gm, stage.config)
