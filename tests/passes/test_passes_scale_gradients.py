"""scale_gradients: the scale enters at the outputs and leaves at the inputs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import leaf
from graphs import Stage

from mpcompile.passes.graph.scale_gradients import scale_gradients

pytestmark = pytest.mark.inside


def scaled(program: Any, *inputs: Any, **options: Any) -> Stage:
    return Stage(scale_gradients, program, *inputs, scaled=True, **options)


def linear(x: torch.Tensor, w: torch.Tensor) -> Any:
    return F.linear(x, w)


def test_applies() -> None:
    """X needs no gradient: it is left alone."""
    stage = scaled(linear, torch.randn(3, 4), leaf(5, 4))
    stage.run_twice()
    stage.expect_text("""\
x: f32[3, 4] = input
w: f32[5, 4] = input
mp_scale: f32[] = input
mp_found: f32[] = input
w_unscale: f32[5, 4] = mpcompile::unscale_grad(w, mp_scale, mp_found)
w_f16: f16[5, 4] = to(w_unscale, f16)
x_f16: f16[3, 4] = to(x, f16)
linear: f16[3, 5] = linear(x_f16, w_f16)
linear_f32: f32[3, 5] = to(linear, f32)
linear_f32_scale: f32[3, 5] = mpcompile::scale_grad(linear_f32, mp_scale)
return linear_f32_scale
""")


def test_not_asked_for() -> None:
    assert not Stage(scale_gradients, linear, leaf(3, 4), leaf(5, 4), scaled=False).run()


def test_nothing_needs_a_gradient() -> None:
    assert not scaled(linear, torch.randn(3, 4), torch.randn(5, 4)).run()


def test_symbolic_sizes() -> None:
    x = leaf(3, 4)
    torch._dynamo.mark_dynamic(x, 0)
    stage = scaled(linear, x, leaf(5, 4))
    stage.run_twice()
    assert "x_unscale: f32[s0, 4] = mpcompile::unscale_grad(x, mp_scale, mp_found)" in stage.text
