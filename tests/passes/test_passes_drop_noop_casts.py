"""drop_noop_casts: what the FP32 capture baked as a cast to FP32 goes; a user's upcast stays."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from compare import leaf
from expecttest import assert_expected_inline
from graphs import Stage

from mpcompile.passes.graph.drop_noop_casts import drop_noop_casts


def test_applies_to_every_spelling() -> None:
    def program(q: torch.Tensor) -> torch.Tensor:
        a = q.softmax(-1).to(q.dtype)
        b = a.type_as(q).to(q)
        return b.to(q.device) * a.to(device=q.device, dtype=q.dtype)

    stage = Stage(drop_noop_casts, program, leaf(4, 4))
    assert stage.run()
    assert_expected_inline(
        stage.text,
        """\
q: f32[4, 4] = input
softmax: f32[4, 4] = softmax(q, -1)
mul: f32[4, 4] = mul(softmax, softmax)
return mul
""",
    )


def test_leaves_what_does_something() -> None:
    """Another dtype, a copy, an explicit `.float()`: the user's words."""

    def program(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        y = x.float().relu().to(torch.float64)
        z = n.float() + n.to(x.dtype)
        return x.to(x.dtype, copy=True) + y.to(x.dtype) + z

    stage = Stage(drop_noop_casts, program, leaf(4, 4), torch.arange(4))
    before = stage.text
    assert not stage.run()
    assert stage.text == before
    assert before.count("= to(") == 6


def test_idempotent_with_several_users_and_symbolic_sizes() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = F.relu(x).to(x.dtype)
        return y.to(x.dtype) + y * y.type_as(x)

    stage = Stage(drop_noop_casts, program, leaf(5, 3), dynamic=True)
    stage.run_twice()
    assert_expected_inline(
        stage.text,
        """\
x_size_0: SymInt = input
x_size_1: SymInt = input
x: f32[s0, s1] = input
relu: f32[s0, s1] = relu(x)
mul: f32[s0, s1] = mul(relu, relu)
add: f32[s0, s1] = add(relu, mul)
return add
""",
    )
