"""drop_noop_casts: what the FP32 capture baked as a cast to FP32 goes; a user's upcast stays."""

import torch
from compare import leaf
from expecttest import assert_expected_inline
from graphs import Stage

from mpcompile.passes.graph.drop_noop_casts import drop_noop_casts


def test_applies_to_every_spelling() -> None:
    def program(q: torch.Tensor) -> torch.Tensor:
        a = q.softmax(-1).to(q.dtype)
        b = a.type_as(q).to(q)
        return b.to(q.device) * a.to(device=q.device, dtype=q.dtype)

    stage = Stage(drop_noop_casts, program, leaf(5, 3), dynamic=True)
    stage.run_twice()
    assert_expected_inline(
        stage.text,
        """\
q_size_0: SymInt = input
q_size_1: SymInt = input
q: f32[s0, s1] = input
softmax: f32[s0, s1] = softmax(q, -1)
mul: f32[s0, s1] = mul(softmax, softmax)
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
    assert not stage.run()
    assert stage.text.count("= to(") == 6
