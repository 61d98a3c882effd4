"""Constants, positions, casts of the user's own, dtypes that are nobody's business."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, assert_near, check, leaf
from torch import nn

from mpcompile import mpcompile


def tiny_epsilon(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    return h / (h.detach().abs() * 0 + 1e-8) * 1e-8


def epsilon_in_a_square_root(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    zero = h.detach() * 0
    return h * torch.rsqrt(zero + 1e-10) * 1e-5


def clamp_at_epsilon(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    return h / (h.detach() * 0).clamp(min=1e-12) * 1e-12


def large_constant(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    return (h * 1e5 + 3e5) / 1e5


def large_tensor_constant(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    return (h * torch.tensor([1e6])) * torch.tensor([1e-6])


def squares_of_large_numbers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w) * 300
    return (h.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * h


def positions(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Rotary embedding at positions FP16 cannot tell apart."""
    steps = torch.arange(4096, 4096 + 8, dtype=torch.float32)
    angle = steps[:, None] * torch.exp(torch.arange(16) * -0.1)
    h = F.linear(x, w)
    return h * angle.cos() + F.linear(h, w) * angle.sin()


def integers_made_float(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(5000, 5008)
    return F.linear(x, w) + (steps.float() % 7)[:, None]


def half_inside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A part that the program computes in FP16 by itself stays as it is."""
    h = F.linear(x, w).half()
    return F.linear((h * 2).float(), w) + F.linear(h, w.half())


CONSTANTS = [
    tiny_epsilon, epsilon_in_a_square_root, clamp_at_epsilon, large_constant,
    large_tensor_constant, squares_of_large_numbers, positions, integers_made_float,
    half_inside,
]  # fmt: skip


@LEVELS
@pytest.mark.parametrize("program", CONSTANTS)
def test_constants(program: Any, level: str) -> None:
    check(program, leaf(8, 16), leaf(16, 16), level=level, low=["linear"])


@LEVELS
def test_integer_features(level: str) -> None:
    """Timestamps through `.float()`: 100003 and 100004 are one number in FP16."""

    def program(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(t.float() - 100000.0, w)

    check(program, torch.randint(100000, 100009, (8, 16)), leaf(16, 16), level=level)


@LEVELS
def test_integer_features_reach_a_product_exactly(level: str) -> None:
    def program(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(t.float(), w) * 1e-5

    weight = torch.tensor([[1.0, -1.0]]).requires_grad_()
    check(program, torch.tensor([[100003, 100002], [70001, 70000]]), weight, level=level)


@LEVELS
def test_cast_to_another_values_dtype_is_no_upcast(level: str) -> None:
    """`.to(q.dtype)`, captured as `.to(float32)`, must not widen what follows."""

    def program(q: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q = F.linear(q, w)
        weights = F.relu(q).to(q.dtype).type_as(q)
        return F.linear(weights, w)

    assert check(program, leaf(8, 16), leaf(16, 16), level=level).ops("LOW") == [
        "linear", "relu", "linear",
    ]  # fmt: skip


@LEVELS
def test_explicit_float_is_an_upcast(level: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w)
        return (h.float() * 3000).relu().float() * 30

    result = check(program, leaf(8, 16), leaf(16, 16), level=level, loss_scale=1.0)
    assert result.ops("LOW") == ["linear"]


@LEVELS
def test_half_inputs_to_an_fp32_model(level: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    reference = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    reference.load_state_dict(model.state_dict())
    mpcompile(model, dtype=torch.float16, level=level, emit="eager", strict=True)
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(8, 16).to(dtype).requires_grad_()
        out = model(x)
        assert_near(out, reference(x.float()), "output", 1e-2)
        (grad,) = torch.autograd.grad(out.mean(), x)
        assert grad.dtype is dtype


@LEVELS
def test_other_dtypes_are_untouched(level: str) -> None:
    def program(
        x: torch.Tensor, w: torch.Tensor, d: torch.Tensor, c: torch.Tensor, i: torch.Tensor
    ) -> Any:
        return (
            F.linear(x, w),
            F.linear(d, d) + 1e-8,
            torch.fft.fft(c) * 2,
            i * 3 + (i > 2).long(),
            (i == 1) | (x[0, :4].detach() > 9),
            x.double().sum() + d.sum(),
        )

    inputs = (
        torch.randn(4, 4, dtype=torch.float64, requires_grad=True),
        torch.randn(4, dtype=torch.complex64, requires_grad=True),
        torch.arange(4),
    )
    result = check(program, leaf(8, 16), leaf(16, 16), *inputs, level=level, low=["linear"])
    assert result.ops("LOW").count("linear") == 1
    exact = program(torch.zeros(1, 4), torch.zeros(1, 4), *inputs)
    for i in (1, 2, 3):
        assert torch.equal(result.model(torch.zeros(1, 4), torch.zeros(1, 4), *inputs)[i], exact[i])


@LEVELS
def test_bf16(level: str) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    options = {"dtype": torch.bfloat16, "level": level, "loss_scale": "dynamic"}
    result = check(model, leaf(8, 16), low=["linear"], **options)
    assert not result.plans[0].scaled


READ_EXACTLY = {
    "a likelihood picked from a softmax": lambda h, i: h.softmax(-1).gather(1, i).log(),
    "a clamped softmax": lambda h, i: h.softmax(-1).clamp(1e-7).log(),
    "a softmax in FP64": lambda h, i: h.softmax(-1).double().log().float(),
    "masked and renormalised": lambda h, i: (h.softmax(-1) * (i >= 0)).log(),
    "a mean of squares": lambda h, i: (h.square().mean() + 1).log(),
    "a mean of exponentials": lambda h, i: ((h / 8).exp().mean() + 1).log(),
    "a gated softmax": lambda h, i: (h.softmax(-1) * (h[:, :1] / 64).sigmoid()).log(),
    "a gated softmax, viewed": lambda h, i: (h.softmax(-1) * (h[:, :1] / 64).sigmoid())[None].log(),
    "a mixture of softmaxes": lambda h, i: (
        h.softmax(-1) * (h[:, :1] / 64).sigmoid()
        + h.flip(-1).softmax(-1) * (1 - (h[:, :1] / 64).sigmoid())
    ).log(),
    "a root of a gated softmax": lambda h, i: (h.softmax(-1) * (h[:, :1] / 64).sigmoid()).pow(0.25),
    "squares of a norm": lambda h, i: (8 * F.layer_norm(h, (16,))).sigmoid().log(),
    "divided by its mean square": lambda h, i: (h / h.square().mean(-1, keepdim=True)).tanh(),
}


@LEVELS
@pytest.mark.parametrize("case", READ_EXACTLY)
def test_what_underflows_or_overflows_fp16_on_its_way_to_fp32(case: str, level: str) -> None:
    """Nothing is stored low between two FP32 operators, though it would take half the bytes."""
    rows = torch.arange(8).view(8, 1)

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return READ_EXACTLY[case](F.linear(x, w), rows)

    check(program, 2 * leaf(8, 16).detach(), 4 * leaf(16, 16).detach(), level=level, low=["linear"])
    check(program, leaf(8, 16), leaf(16, 16), level=level, low=["linear"], loss_scale=1.0)
