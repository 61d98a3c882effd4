"""Constants, positions, casts of the user's own, dtypes that are nobody's business; and programs
that a fuzzer and users' loops found.
"""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, SETTINGS, assert_near, check, fallback_reason, leaf
from fuzz_programs import AddTo, Clip
from torch import nn
from torch.utils.checkpoint import checkpoint
from versions import since

from mpcompile import MPCompileWarning, loss_scale_of, mpcompile


def positions(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Rotary embedding at positions FP16 cannot tell apart."""
    steps = torch.arange(4096, 4096 + 8, dtype=torch.float32)
    angle = steps[:, None] * torch.exp(torch.arange(16) * -0.1)
    return h * angle.cos() + F.linear(h, w) * angle.sin()


CONSTANTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "tiny_epsilon": lambda h, w: h / (h.detach().abs() * 0 + 1e-8) * 1e-8,
    "epsilon_in_a_square_root": lambda h, w: h * torch.rsqrt(h.detach() * 0 + 1e-10) * 1e-5,
    "clamp_at_epsilon": lambda h, w: h / (h.detach() * 0).clamp(min=1e-12) * 1e-12,
    "large_constant": lambda h, w: (h * 1e5 + 3e5) / 1e5,
    "large_tensor_constant": lambda h, w: (h * torch.tensor([1e6])) * torch.tensor([1e-6]),
    "squares_of_large_numbers": lambda h, w: (
        ((300 * h).pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * (300 * h)
    ),
    "positions": positions,
    "integers_made_float": lambda h, w: h + (torch.arange(5000, 5008).float() % 7)[:, None],
    "cast_by_float": lambda h, w: (h.float() * 3000).relu().float() * 30 / 9e4,
    "cast_to_fp32": lambda h, w: (h.to(torch.float32) * 3000).relu() * 30 / 9e4,
    "cast_by_its_type": lambda h, w: (h.type(torch.float) * 3000).relu() * 30 / 9e4,
    "bits": lambda h, w: h + (h.detach().view(torch.int32) & -65536).view(torch.float32),
    "a_sum_by_index": lambda h, w: (
        h.new_zeros(2, 16).index_put((torch.arange(9000) % 2,), h[0].sigmoid(), True) / 4500
    ),
    # A part that the program computes in FP16 by itself stays as it is.
    "half_inside": lambda h, w: F.linear((h.half() * 2).float(), w) + F.linear(h.half(), w.half()),
}


@LEVELS
@pytest.mark.parametrize("case", CONSTANTS)
def test_constants(case: str, level: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return CONSTANTS[case](F.linear(x, w), w)

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


# -- found by a fuzzer and in users' loops ---------------------------------------------------------


def hook_after_a_use(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = x.sum(0)
    before = (w @ x.t()).sum(1) + h[0]
    h.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return before, h


def hook_on_a_view_after_a_use(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = torch.tanh(x @ w)
    row = h[2]
    before = row * 3
    row.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return before, row, h


@SETTINGS
@pytest.mark.parametrize("program", [hook_after_a_use, hook_on_a_view_after_a_use])
def test_a_hook_sees_every_use(program: Any, level: str, emit: str) -> None:
    check(program, leaf(8, 16), leaf(16, 16), level=level, emit=emit)


def write_through_detach(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.enable_grad():
        w.detach().mul_(0.5)
    return x @ w


def write_under_no_grad_to_a_view(x: torch.Tensor, w: torch.Tensor) -> Any:
    loss = (x * 2).mean()
    with torch.no_grad():
        w[0] += 1
    return loss


@pytest.mark.parametrize("emit", ["eager", "aot_eager"])
def test_a_leaf_that_is_written_is_left_alone(emit: str) -> None:
    fallback_reason(write_under_no_grad_to_a_view, leaf(8, 16), leaf(16, 16), emit=emit)


@SETTINGS
def test_a_leaf_that_is_written_before_it_is_read(level: str, emit: str) -> None:
    check(write_through_detach, leaf(8, 16), leaf(16, 16), level=level, emit=emit)


@since("2.13", "Dynamo itself loses the history of what such a function writes")
def test_an_input_that_a_function_of_the_users_writes() -> None:
    """Left as it is. (In torch 2.13 AOTAutograd itself loses the gradient of y.)"""

    def program(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        AddTo.apply(h, y * 1)  # type: ignore[no-untyped-call]
        return y * 0.5

    y = leaf(4, 8)
    fast = mpcompile(program, dtype=torch.float16, emit="eager")
    found = []
    for run in (program, fast):
        h = leaf(4, 8) * 1
        expected = pytest.warns(MPCompileWarning, match="or by the caller")
        with expected if run is fast else contextlib.nullcontext():
            out = run(h, y)
        found.append(torch.autograd.grad(out.sum() + h.sum(), y)[0])
    torch.testing.assert_close(found[1], found[0])


def write_to_what_a_function_made(x: torch.Tensor, w: torch.Tensor) -> Any:
    made = Clip.apply(w)  # type: ignore[no-untyped-call]
    made.div_(2)
    return x @ w, made


def write_to_what_cond_made(x: torch.Tensor, w: torch.Tensor) -> Any:
    made = torch.cond(x.sum() > 0, lambda p: p @ w, lambda p: torch.softmax(p, -1), (x,))
    made.tanh_()
    return x @ w, made


@SETTINGS
@pytest.mark.parametrize("program", [write_to_what_a_function_made, write_to_what_cond_made])
def test_a_write_to_a_result_is_none_to_an_operand(program: Any, level: str, emit: str) -> None:
    """It might share memory with an operand; a parameter is not written back for that."""
    check(program, leaf(8, 16), leaf(16, 16), level=level, emit=emit)


@SETTINGS
def test_an_input_that_is_returned_is_itself(level: str, emit: str) -> None:
    """A graph returns it where a body reads it as well."""

    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        made = torch.cond(x.sum() > 0, lambda p: p @ w, lambda p: torch.softmax(p, -1), (x,))
        return made, w

    x, w = leaf(8, 16), leaf(16, 16)
    compared = check(program, x, w, level=level, emit=emit)
    assert compared.model(x, w)[1] is w


@pytest.mark.parametrize("emit", ["eager", "aot_eager"])
def test_compiled_blocks_inside_checkpoints(emit: str) -> None:
    """Compiled at their first call, which the checkpoint watches; the scale found, too."""
    blocks = [
        nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
        for _ in range(2)
    ]
    plain = copy.deepcopy(blocks)
    fast = [mpcompile(b, dtype=torch.float16, emit=emit, strict=True) for b in blocks]
    x = torch.randn(8, 32)
    for _ in range(3):
        for own in (plain, fast):
            h = x.clone().requires_grad_()
            for block in own:
                h = checkpoint(block, h, use_reentrant=False)  # type: ignore[assignment]
            h.sum().backward()
        for a, b in zip(plain, blocks, strict=True):
            for wanted, actual in zip(a.parameters(), b.parameters(), strict=True):
                assert (actual.grad - wanted.grad).norm() <= 1e-2 * wanted.grad.norm() + 1e-4
    assert all(loss_scale_of(b).skipped_steps == 0 for b in fast)
