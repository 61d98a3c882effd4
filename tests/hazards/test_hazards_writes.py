"""Hazards around memory: writes in place, to values, views, inputs and buffers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, SETTINGS, assert_near, check, leaf
from module_of import module_of
from torch import nn

from mpcompile import mpcompile


def relu_on_a_result(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(F.relu_(F.linear(x, w)), w)


def chain_of_writes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    h.mul_(0.5).add_(1).clamp_(min=0)
    h += x
    h *= h.sigmoid()
    return F.linear(h, w)


def residual_stream(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x * 1
    h += F.linear(x, w)
    h += F.gelu(F.linear(x, w))
    return h


def half_of_a_slice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    h[:, :4] = h[:, 4:8] * 2
    h[0] = 1.0
    h[:, -1] += x[:, 0]
    return F.linear(h, w)


def fill_a_new_tensor(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(8, 32)
    out[:, :16] = F.linear(x, w)
    out[:, 16:] = x
    return out @ out.t()


def fill_like_a_result(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    out = torch.empty_like(h)
    out[:4] = h[4:]
    out[4:] = h[:4] * 2
    return F.linear(out, w)


def masked_fill_on_a_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    scores = F.linear(x, w)
    scores.view(8, 4, 4)[:, 1].masked_fill_(x[:, :4] > 0, -1.0)
    return F.linear(scores.softmax(-1), w)


def view_taken_before_read_after(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    view = h.view(-1)
    h.relu_()
    return F.linear(view.view(8, 16) * 2, w)


def base_written_through_a_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    rows = h.t()[:3]
    rows.mul_(3)
    return F.linear(h, w) + rows.sum()


def read_before_the_write(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    before = h + 1
    h.neg_()
    return F.linear(before, w) + F.linear(h, w)


def detached_alias(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    h.detach().clamp_(-0.5, 0.5)
    return h.sum(-1)


def written_without_grad(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    with torch.no_grad():
        h.mul_(2).round_()
    return h.sum(-1)


def index_put(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    rows = torch.tensor([0, 3, 3])
    h.index_put_((rows,), x[:3], accumulate=True)
    h.index_add_(0, rows, x[:3])
    h.scatter_(1, torch.zeros(8, 1, dtype=torch.int64), x[:, :1])
    return F.linear(h, w)


def copy_and_zero(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    other = torch.ones_like(h)
    other.copy_(h)
    h.zero_()
    return F.linear(other, w) + h


def out_argument(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        double, result = torch.empty(8, 16), torch.empty(8, 16)
        torch.mul(x, 2, out=double)
        torch.mm(double, w, out=result)
    return F.linear(x, w) + result


def resized_transpose(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, w)
    h.transpose_(0, 1).unsqueeze_(0)
    return F.linear(h.squeeze(0).t(), w)


def random_in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    noise = torch.empty_like(x).uniform_(-1, 1)
    return F.linear(F.linear(x, w) + noise.normal_(), w)


PROGRAMS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    relu_on_a_result, chain_of_writes, residual_stream, half_of_a_slice, fill_a_new_tensor,
    fill_like_a_result, masked_fill_on_a_view, view_taken_before_read_after,
    base_written_through_a_view, read_before_the_write, detached_alias, written_without_grad,
    index_put, copy_and_zero, out_argument, resized_transpose, random_in_place,
]  # fmt: skip


@SETTINGS
@pytest.mark.parametrize("program", PROGRAMS)
def test_writes(program: Any, level: str, emit: str) -> None:
    result = check(program, leaf(8, 16), leaf(16, 16), level=level, emit=emit)
    assert "linear" not in result.ops("KEEP")


@LEVELS
def test_relu_after_convolution_runs_low(level: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3))
    check(model, leaf(2, 3, 8, 8), level=level, low=["conv2d", "relu"])


@LEVELS
def test_residual_block_with_in_place_activation(level: str) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        out = m.silu(m.norm(m.conv(x)))
        out = m.norm(m.conv(out))
        out += x
        return m.silu(out)

    conv, norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
    silu = nn.SiLU(inplace=True)  # no ReLU: a rounding at zero flips its gradient
    model = module_of(forward, conv=conv, norm=norm, silu=silu)
    check(model, leaf(2, 8, 6, 6), level=level, low=["conv2d"])


def write_to_input(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    x[:, 0] = 7
    return F.linear(x, w)


def write_a_result_into_input(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.linear(x.clone(), w)
    x.copy_(h.detach())
    x += 1
    return h


@SETTINGS
@pytest.mark.parametrize("program", [write_to_input, write_a_result_into_input])
def test_input_written(program: Any, level: str, emit: str) -> None:
    check(program, torch.randn(8, 16), leaf(16, 16), level=level, emit=emit, low=["linear"])


def assert_as_in_fp32(program: Any, run: Callable[[Any], list[Any]], **options: Any) -> None:
    """What `run` finds of the program compiled is what it finds of the program itself."""
    fast = mpcompile(program, dtype=torch.float16, loss_scale=1024.0, strict=True, **options)
    found = []
    for function in (program, fast):
        torch.manual_seed(0)
        found.append(run(function))
    for expected, actual in zip(*found, strict=True):
        assert_near(actual, expected, "result or gradient", 1e-2)


@SETTINGS
def test_activation_written_that_comes_from_outside(level: str, emit: str) -> None:
    """`x += positions` at a module's entry: gradients pass both ways, true to size."""

    def program(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h += w[0]
        h[:, 1:].mul_(2)
        return F.linear(h, w)

    def run(function: Any) -> list[Any]:
        x, w = leaf(8, 16), leaf(16, 16)
        h = x * 2
        out = function(h, w)
        (out.square().mean() + h.square().mean()).backward()  # h, as it was written
        return [h.detach(), out.detach(), x.grad, w.grad]

    assert_as_in_fp32(program, run, emit=emit, level=level)


def test_input_written_and_returned() -> None:
    def program(h: torch.Tensor, w: torch.Tensor) -> Any:
        h += 1
        return h, F.linear(h, w)

    def run(function: Any) -> list[Any]:
        x, w = leaf(8, 16), leaf(16, 16)
        h = x * 2
        same, out = function(h, w)
        assert same is h
        (out.square().mean() + same.mean()).backward()
        return [x.grad, w.grad]

    assert_as_in_fp32(program, run, emit="aot_eager")


@pytest.mark.parametrize("write", ["h", "view"])
@SETTINGS
def test_input_written_and_views_of_it_returned(level: str, emit: str, write: str) -> None:
    """The views are the caller's: what it writes to them later is in the history of its tensor."""

    def program(h: torch.Tensor, w: torch.Tensor) -> Any:
        early = h.view(4, 2, 16)
        if write == "h":
            h.add_(1)
        else:
            early[0].mul_(w[0])
        return h[0], early, F.linear(h * 2, w)

    def run(function: Any) -> list[Any]:
        x, w = leaf(8, 16), leaf(16, 16)
        h = x * w[0]
        row, early, out = function(h, w)
        assert len({t.untyped_storage().data_ptr() for t in (h, row, early)}) == 1
        early[1].mul_(w[1])
        (h.square().sum() + row.sum() + out.sum()).backward()
        return [h.detach(), out.detach(), x.grad, w.grad]

    assert_as_in_fp32(program, run, level=level, emit=emit)


@SETTINGS
def test_what_the_backward_reads_of_a_buffer_that_was_written(level: str, emit: str) -> None:
    """It is kept, not computed again from the buffer, which by then holds something else."""

    def program(buffer: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        buffer.sub_(w, alpha=0.5)
        return torch.outer(buffer, w)

    def run(function: Any) -> list[Any]:
        buffer, w = torch.randn(8), leaf(8)
        (function(buffer, w).sum() + buffer.sum()).backward()
        return [w.grad]

    assert_as_in_fp32(program, run, level=level, emit=emit)


@SETTINGS
def test_batch_norm_statistics(level: str, emit: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    result = check(model, leaf(4, 3, 6, 6), level=level, steps=3, emit=emit, low=["conv2d"])
    assert result.model[1].num_batches_tracked == 3


@SETTINGS
def test_buffers_of_the_users_own(level: str, emit: str) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.linear(x)
        m.calls += 1
        with torch.no_grad():
            m.average.lerp_(h.mean(0), 0.1)
        m.last = h.detach()
        return m.linear(h)

    calls, average = nn.Buffer(torch.tensor(0)), nn.Buffer(torch.zeros(16))
    last = nn.Buffer(torch.zeros(8, 16), persistent=False)
    model = module_of(forward, linear=nn.Linear(16, 16), calls=calls, average=average, last=last)
    result = check(model, leaf(8, 16), level=level, steps=3, emit=emit, low=["linear"])
    assert result.model.calls == 3
