"""Programs that a fuzzer and users' loops found: each is right, or left in FP32 and says so."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from compare import SETTINGS, check, fallback_reason, leaf
from fuzz_programs import AddTo, Clip
from torch import nn
from torch.utils.checkpoint import checkpoint
from versions import since

from mpcompile import MPCompileWarning, loss_scale_of, mpcompile


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
    torch.manual_seed(0)
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
