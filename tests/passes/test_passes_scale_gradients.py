"""scale_gradients: the scale enters at the outputs and leaves at the inputs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import leaf
from graphs import Stage
from module_of import function_of

from mpcompile import ir
from mpcompile.errors import CannotRewrite
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


def test_each_result_once_and_only_what_is_differentiable() -> None:
    def program(x: torch.Tensor) -> Any:
        y = x.exp()
        return y, y, y.detach(), y > 1, y.argmax(), x

    stage = scaled(program, leaf(4))
    stage.run()
    stage.expect_text("""\
x: f32[4] = input
mp_scale: f32[] = input
mp_found: f32[] = input
x_unscale: f32[4] = mpcompile::unscale_grad(x, mp_scale, mp_found)
exp: f32[4] = exp(x_unscale)
detach: f32[4] = detach(exp)
gt: b8[4] = gt(exp, 1)
argmax: i64[] = argmax(exp)
exp_scale: f32[4] = mpcompile::scale_grad(exp, mp_scale)
exp_own: f32[4] = clone(exp_scale)
detach_1: f32[4] = detach(exp_own)
return exp_own, detach_1, gt, argmax
""")


def test_symbolic_sizes() -> None:
    x = leaf(3, 4)
    torch._dynamo.mark_dynamic(x, 0)
    stage = scaled(linear, x, leaf(5, 4))
    stage.run_twice()
    assert "x_unscale: f32[s0, 4] = mpcompile::unscale_grad(x, mp_scale, mp_found)" in stage.text


Clip = function_of(lambda ctx, x: x * 1, lambda ctx, grad: grad.clamp(-1, 1))


def test_a_backward_of_the_users_gets_gradients_true_to_size() -> None:
    """Undone before the call, redone after it: both directions cross an FP32 edge."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(Clip.apply(F.linear(x, w)), w)

    stage = scaled(program, leaf(3, 4), leaf(4, 4))
    stage.run()
    # below the call, the gradient leaves the low zone (unscale); above it, it enters one (scale)
    call = next(n for n in stage.gm.graph.nodes if ir.is_opaque(n))
    operands = [n.name for n in call.all_input_nodes if n.op != "get_attr"]
    assert operands == ["linear_f32_scale"]
    (result,) = call.users
    assert [n.name for n in result.users] == ["getitem_unscale"]
    assert [n.name for n in stage.node("getitem_unscale").users] == ["getitem_f16"]


def test_an_input_that_is_written_is_copied_and_copied_back() -> None:
    def program(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h.mul_(2)
        return F.linear(h, w)

    w = leaf(4, 4)
    stage = scaled(program, w * 1, w)
    stage.run()
    stage.expect_text("""\
h: f32[4, 4] = input
w: f32[4, 4] = input
mp_scale: f32[] = input
mp_found: f32[] = input
h_unscale: f32[4, 4] = mpcompile::unscale_grad(h, mp_scale, mp_found)
h_own: f32[4, 4] = clone(h_unscale)
w_unscale: f32[4, 4] = mpcompile::unscale_grad(w, mp_scale, mp_found)
w_f16: f16[4, 4] = to(w_unscale, f16)
mul_: f32[4, 4] = mul_(h_own, 2)
mul__f16: f16[4, 4] = to(mul_, f16)
linear: f16[4, 4] = linear(mul__f16, w_f16)
linear_f32: f32[4, 4] = to(linear, f32)
h_own_scale: f32[4, 4] = mpcompile::scale_grad(h_own, mp_scale)
h_back: f32[4, 4] = copy_(h, h_own_scale)
linear_f32_scale: f32[4, 4] = mpcompile::scale_grad(linear_f32, mp_scale)
return linear_f32_scale
""")


def test_an_input_written_behind_autograds_back() -> None:
    def program(w: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            w.mul_(2)
        return w + 1

    stage = scaled(program, leaf(4))
    stage.run()
    names = [node.name for node in stage.gm.graph.nodes if node.op == "call_function"]
    assert names.index("w_unscale") > names.index("mul_")

    def after_a_read(w: torch.Tensor) -> torch.Tensor:
        other = w * 3
        return program(w) + other

    with pytest.raises(CannotRewrite, match="w needs a gradient and is written without one"):
        scaled(after_a_read, leaf(4)).run()
