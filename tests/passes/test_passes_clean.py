"""clean: what the rewrite left over goes; a rounding the plan asked for stays."""

import torch
import torch.nn.functional as F
from compare import leaf
from expecttest import assert_expected_inline
from graphs import Stage
from torch import fx

from mpcompile import ir
from mpcompile.ir import aten
from mpcompile.passes.graph.clean import clean


def cast(stage: Stage, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    decision = ir.added(ir.Role.CAST, "for the test")
    with stage.gm.graph.inserting_before(value.next):
        return ir.insert(
            stage.gm.graph, aten.to.dtype, (value, dtype),
            name=f"{value.name}_{ir.SHORT[dtype]}", like=value, decision=decision,
        )  # fmt: skip


def test_down_after_up_is_the_value_itself() -> None:
    """As where an autograd.Function in FP32 stood between two low operators and was removed."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(F.relu(F.linear(x, w)), w)

    stage = Stage(clean, program, leaf(3, 4), leaf(4, 4))
    low = stage.node("linear")
    down = cast(stage, cast(stage, low, torch.float32), torch.float16)
    stage.node("relu").replace_input_with(low, down)
    stage.run_twice()
    assert_expected_inline(
        stage.text,
        """\
x: f32[3, 4] = input
w: f32[4, 4] = input
w_f16: f16[4, 4] = to(w, f16)
x_f16: f16[3, 4] = to(x, f16)
linear: f16[3, 4] = linear(x_f16, w_f16)
relu: f16[3, 4] = relu(linear)
linear_1: f16[3, 4] = linear(relu, w_f16)
linear_1_f32: f32[3, 4] = to(linear_1, f32)
return linear_1_f32
""",
    )


def test_up_after_down_is_a_rounding_and_stays() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.exp() + 1

    stage = Stage(clean, program, leaf(4))
    wide = stage.node("exp")
    up = cast(stage, cast(stage, wide, torch.float16), torch.float32)
    stage.node("add").replace_input_with(wide, up)
    assert not stage.run()
    assert "add: f32[4] = add(exp_f16_f32, 1)" in stage.text


def test_a_wider_detour_only() -> None:
    """BF16 through FP16 is no detour: FP16 has not its range."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(F.relu(F.linear(x, w)), w)

    stage = Stage(clean, program, leaf(3, 4), leaf(4, 4), low=torch.bfloat16)
    low = stage.node("linear")
    again = cast(stage, cast(stage, low, torch.float16), torch.bfloat16)
    stage.node("relu").replace_input_with(low, again)
    assert not stage.run()


def test_casts_that_nobody_reads_go_and_the_users_own_stay() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.half().float() + 1

    x = leaf(5)
    torch._dynamo.mark_dynamic(x, 0)
    stage = Stage(clean, program, x)
    cast(stage, cast(stage, stage.node("x"), torch.float16), torch.float32)
    assert stage.run()
    assert_expected_inline(
        stage.text,
        """\
x_size_0: SymInt = input
x: f32[s0] = input
to: f16[s0] = to(x, f16)
to_1: f32[s0] = to(to, f32)
add: f32[s0] = add(to_1, 1)
return add
""",
    )
    stage.run_twice()
