"""outline: checkpointed bodies go back into the operator that AOTAutograd recomputes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import leaf
from graphs import Stage, ran_twice
from torch.utils.checkpoint import checkpoint

from mpcompile import ir
from mpcompile.errors import CannotRewrite
from mpcompile.passes.graph.higher_order import outline


def test_applies() -> None:
    """The weight's cast stands outside: it is no activation. What the body made stands inside."""

    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        def body(y: torch.Tensor) -> torch.Tensor:
            return F.linear(y.cos(), w).exp()

        return checkpoint(body, x, use_reentrant=False) + x

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


def test_nested_and_repeated() -> None:
    def program(x: torch.Tensor) -> Any:
        def inner(y: torch.Tensor) -> torch.Tensor:
            return y.sin() * y

        def outer(y: torch.Tensor) -> Any:
            return checkpoint(inner, y.cos(), use_reentrant=False).exp()

        h = checkpoint(outer, x, use_reentrant=False)
        return checkpoint(inner, h, use_reentrant=False)

    stage = ran_twice(outline, program, leaf(4))

    def ops(body: Any) -> list[str]:
        return [ir.op_name(n) for n in body.graph.nodes if ir.is_op(n)]

    call = "higher_order::tag_activation_checkpoint"
    assert ops(stage.gm) == [call, call]
    outer, again = dict(stage.gm.named_children()).values()
    assert ops(outer) == ["aten::cos", call, "aten::exp"]
    (inner,) = outer.children()
    assert ops(inner) == ops(again) == ["aten::sin", "aten::mul"]


def test_several_results_some_read_twice_and_a_symbolic_size() -> None:
    def program(x: torch.Tensor) -> Any:
        def body(y: torch.Tensor) -> Any:
            a, b = y.chunk(2, -1)
            return a.sin(), b, y

        a, b, y = checkpoint(body, x, use_reentrant=False)
        return a + b, a * y.sum()

    x = leaf(3, 4)
    torch._dynamo.mark_dynamic(x, 0)
    stage = Stage(outline, program, x)
    stage.run()
    stage.expect_text("""\
x_size_0: SymInt = input
x: f32[s0, 4] = input
checkpoint_body_0 = self.checkpoint_body_0
checkpoint: (f32[s0, 2], f32[s0, 2]) = checkpoint(checkpoint_body_0, x, use_reentrant=False)
getitem_2: f32[s0, 2] = getitem(checkpoint, 0)
getitem_3: f32[s0, 2] = getitem(checkpoint, 1)
add: f32[s0, 2] = add(getitem_3, getitem_2)
sum_1: f32[] = sum(x)
mul: f32[s0, 2] = mul(getitem_3, sum_1)
return add, mul

checkpoint_body_0:
x: f32[s0, 4] = input
chunk: (f32[s0, 2], f32[s0, 2]) = chunk(x, 2, -1)
getitem: f32[s0, 2] = getitem(chunk, 0)
getitem_1: f32[s0, 2] = getitem(chunk, 1)
sin: f32[s0, 2] = sin(getitem)
return getitem_1, sin
""")


def test_constants_are_handed_in() -> None:
    def program(x: torch.Tensor) -> Any:
        def body(y: torch.Tensor) -> torch.Tensor:
            return y.sin() * torch.tensor([1.0, 2.0])

        return checkpoint(body, x, use_reentrant=False)

    stage = Stage(outline, program, leaf(2))
    stage.run()
    body = stage.gm.checkpoint_body_0
    assert not body.graph.find_nodes(op="get_attr")
    assert len(body.graph.find_nodes(op="placeholder")) == 2


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
