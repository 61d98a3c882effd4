"""Casts that go: what the rewrite left over and what the FP32 capture baked in. And which casts of
weights become one.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import leaf
from graphs import Stage, ran_twice
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from mpcompile import ir, operators
from mpcompile.ir import aten
from mpcompile.passes.graph.noop_casts import clean, drop_noop_casts
from mpcompile.passes.joint.together import CAST, cast_together

# -- clean -----------------------------------------------------------------------------------------


def cast(stage: Stage, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    decision = ir.added(ir.Role.CAST, "for the test")
    with stage.gm.graph.inserting_before(value.next):
        return ir.insert(
            aten.to.dtype, value, dtype,
            name=f"{value.name}_{ir.SHORT[dtype]}", like=value, decision=decision,
        )  # fmt: skip


def test_down_after_up_is_the_value_itself() -> None:
    """As where an autograd.Function in FP32 stood between two low operators and was removed."""
    stage = Stage(clean, lambda x, w: F.linear(F.relu(F.linear(x, w)), w), leaf(3, 4), leaf(4, 4))
    low = stage.node("linear")
    down = cast(stage, cast(stage, low, torch.float32), torch.float16)
    stage.node("relu").replace_input_with(low, down)
    stage.run_twice()
    stage.expect_text("""\
x: f32[3, 4] = input
w: f32[4, 4] = input
w_f16: f16[4, 4] = to(w, f16)
x_f16: f16[3, 4] = to(x, f16)
linear: f16[3, 4] = linear(x_f16, w_f16)
relu: f16[3, 4] = relu(linear)
linear_1: f16[3, 4] = linear(relu, w_f16)
linear_1_f32: f32[3, 4] = to(linear_1, f32)
return linear_1_f32
""")


def test_up_after_down_is_a_rounding_and_stays() -> None:
    stage = Stage(clean, lambda x: x.exp() + 1, leaf(4))
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
    x = leaf(5)
    torch._dynamo.mark_dynamic(x, 0)
    stage = Stage(clean, lambda x: x.half().float() + 1, x)
    cast(stage, cast(stage, stage.node("x"), torch.float16), torch.float32)
    assert stage.run()
    stage.expect_text("""\
x_size_0: SymInt = input
x: f32[s0] = input
to: f16[s0] = to(x, f16)
to_1: f32[s0] = to(to, f32)
add: f32[s0] = add(to_1, 1)
return add
""")
    stage.run_twice()


# -- drop_noop_casts -------------------------------------------------------------------------------


def test_applies_to_every_spelling() -> None:
    def program(q: torch.Tensor) -> torch.Tensor:
        a = q.softmax(-1).to(torch.float32 if q is None else q.dtype)
        b = a.type_as(q).to(q)
        return b.to(q.device) * a.to(device=q.device, dtype=q.dtype)

    stage = ran_twice(drop_noop_casts, program, leaf(5, 3), dynamic=True)
    stage.expect_text("""\
q_size_0: SymInt = input
q_size_1: SymInt = input
q: f32[s0, s1] = input
softmax: f32[s0, s1] = softmax(q, -1)
mul: f32[s0, s1] = mul(softmax, softmax)
return mul
""")


def test_leaves_what_does_something() -> None:
    """Another dtype, a copy, an explicit `.float()`: the user's words."""

    def program(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        y = x.float().relu().to(torch.float64)
        z = n.float() + n.to(x.dtype)
        return x.to(x.dtype, copy=True) + y.to(x.dtype) + z

    stage = Stage(drop_noop_casts, program, leaf(4, 4), torch.arange(4))
    assert not stage.run()
    assert stage.text.count("= to(") == 6


# -- cast_together ---------------------------------------------------------------------------------


assert "library" in operators.__all__  # it registers cast_all
ALL = torch.ops.mpcompile.cast_all.default
LOW = torch.bfloat16
Forward = Callable[..., tuple[Tensor, ...]]


def low(x: Tensor, dtype: torch.dtype = LOW) -> Tensor:
    return CAST(x, dtype)


def taken(forward: Forward, *inputs: Tensor, tracing: str = "fake") -> int:
    """How many casts are made at once; what the graph computes must stay."""
    gm = make_fx(forward, tracing_mode=tracing)(*inputs)
    before = [n for n in gm.graph.nodes if n.target is CAST]
    changed = cast_together(gm.graph)
    gm.graph.lint()
    gm.recompile()
    for found, wanted in zip(gm(*inputs), forward(*inputs), strict=True):
        assert found.stride() == wanted.stride()
        assert torch.equal(found, wanted)
    after = [n for n in gm.graph.nodes if n.target is CAST]
    assert changed == (len(after) < len(before))
    together = sum(len(n.args[0]) for n in gm.graph.find_nodes(op="call_function", target=ALL))
    assert together == len(before) - len(after)
    return together


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def chain(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Two products; both low weights are kept for the backward."""
    v16, w16 = low(v), low(w).t()
    return torch.mm(torch.mm(low(x), v16), w16), v16, w16


def test_two_weights_are_cast_at_once() -> None:
    x, v, w = weights((4, 8), (8, 8), (6, 8))
    gm = make_fx(chain, tracing_mode="fake")(x, v, w)
    assert cast_together(gm.graph)
    (made,) = gm.graph.find_nodes(op="call_function", target=ALL)
    names = {str(n) for n in made.args[0]}
    assert names == {"x_1", "v_1", "w_1"}  # small ones all: that of x is an input, too
    assert taken(chain, x, v, w) == 3


@pytest.mark.parametrize("kept", [True, False])
def test_a_large_one_only_if_it_is_kept_anyway(kept: bool) -> None:
    def products(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        v16, w16 = low(v), low(w)
        result = torch.mm(torch.mm(x, v16), w16)
        return (result, v16, w16) if kept else (result,)

    v, w = weights((200, 200), (200, 200))
    assert taken(products, torch.ones(2, 200, dtype=LOW), v, w) == (2 if kept else 0)


def test_not_for_a_kernel_that_casts_on_the_way() -> None:
    def added(x: Tensor, v: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        v16 = low(v)
        return torch.mm(x, v16) + low(bias), torch.mm(x, low(w)), v16 + 1, v16

    x = torch.ones(2, 8, dtype=LOW)
    assert taken(added, x, *weights((8, 8), (8, 8), (8,))) == 0  # one alone is not worth it


def test_the_bias_of_a_product() -> None:
    def biased(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return (torch.addmm(low(bias), x, low(w)),)

    assert taken(biased, torch.ones(2, 8, dtype=LOW), *weights((8, 8), (8,))) == 2


def test_of_convolutions_those_that_are_products() -> None:
    """Inductor lays other weights out again, where it casts them; and a bias it adds elsewhere."""

    def convolved(x: Tensor, v: Tensor, w: Tensor, far: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        zeros, ones = [0, 0], [1, 1]
        for weight in (v, w, far):
            of = low(bias) if weight is v else None
            x = aten.convolution.default(x, low(weight), of, ones, zeros, ones, False, zeros, 1)
        return (x,)

    x = torch.ones(1, 4, 5, 5, dtype=LOW)
    given = weights((4, 4, 1, 1), (4, 4, 1, 1), (4, 4, 3, 3), (4,))
    assert taken(convolved, x, *given) == 2


def test_each_dtype_by_itself() -> None:
    def both(x: Tensor, y: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        halves = [torch.mm(y, low(w, torch.float16)) for w in given[:2]]
        return (*halves, *(torch.mm(x, low(w)) for w in given[2:]))

    x = torch.ones(2, 8)
    shapes = [(8, 8)] * 5
    assert taken(both, x.to(LOW), x.half(), *weights(*shapes)) == 5


@pytest.mark.parametrize("by", ["copy", "list", "view"])
def test_not_what_lies_otherwise_or_is_written(by: str) -> None:
    def strange(x: Tensor, gaps: Tensor, written: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        if by == "copy":
            aten.copy_.default(written, written + 1)
        elif by == "list":
            aten._foreach_add_.Scalar([written], 1)
        else:
            aten.mul_.Scalar(written.view(64), 2)
        return tuple(torch.mm(x, low(of)) for of in (gaps, written, w))

    x, gaps = torch.ones(2, 8, dtype=LOW), torch.randn(8, 16)[:, ::2]
    written, w = weights((8, 8), (8, 8))
    gm = make_fx(strange, tracing_mode="fake")(x, gaps, written, w)
    assert not cast_together(gm.graph)


def test_what_is_written_after_it() -> None:
    """As by the optimizer's step in a whole one; and what two products read is kept anyway."""

    def stepped(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        results = [torch.mm(x, half) for half in (low(v), low(w)) for _ in range(2)]
        aten.copy_.default(v, v.clone())
        return tuple(results)

    x = torch.ones(2, 256, dtype=LOW)
    assert taken(stepped, x, *weights((256, 256), (256, 256))) == 2


def test_not_of_unknown_sizes() -> None:
    x, v, w = weights((4, 8), (8, 8), (6, 8))
    assert taken(chain, x, v, w, tracing="symbolic") == 0


def test_a_transposed_weight_stays_so() -> None:
    def product(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.mm(x, low(v)), torch.mm(x, low(w))

    v, w = weights((8, 6), (8, 6))
    assert taken(product, torch.ones(2, 6, dtype=LOW), v.t(), w.t()) == 2


def test_the_operator_casts_as_the_cast_does() -> None:
    given = [*weights((3, 5), (7,)), torch.randn(4, 6).t(), torch.tensor([1e6, -1e-9, torch.nan])]
    found = ALL(given, torch.float16)
    for one, x in zip(found, given, strict=True):
        assert one.stride() == x.stride()
        assert torch.equal(one.nan_to_num(7), x.half().nan_to_num(7))
        assert one.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    sample: Any = ([torch.randn(3, 4), torch.randn(2)], LOW)
    torch.library.opcheck(ALL, sample)
