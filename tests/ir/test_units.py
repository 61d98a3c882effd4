"""Every gradient carries the scale to the power 0 or 1: what is returned in every way, the proof,
and that the proof has teeth.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import SETTINGS, check, fallback_reason, leaf
from fuzz_programs import Clip
from graphs import Stage, ran
from module_of import function_of
from torch import fx
from versions import not_on

from mpcompile import ir, mpcompile
from mpcompile.ir import units
from mpcompile.passes.graph import scale_gradients as scaling
from mpcompile.passes.graph.noop_casts import clean

Program = Callable[[torch.Tensor, torch.Tensor], Any]


def complaints(gm: fx.GraphModule) -> list[str]:
    return list(units.complaints(gm, lambda: units.History(gm)))


def slice_of_zeros(x: torch.Tensor, w: torch.Tensor) -> Any:
    out = torch.zeros(8, 32)
    out[:, :16] = F.linear(x, w)
    return out


def losses_by_index(x: torch.Tensor, w: torch.Tensor) -> Any:
    losses = torch.zeros(2)
    losses[0] = F.linear(x, w).square().mean()
    losses[1] = F.linear(x, w).mean()
    return losses


def rows_in_a_loop(x: torch.Tensor, w: torch.Tensor) -> Any:
    out = x.new_empty(8, 16)
    for i in range(8):
        out[i] = w @ x[i]
    return out


def filled_by_a_number(x: torch.Tensor, w: torch.Tensor) -> Any:
    return torch.zeros(4).fill_(F.linear(x, w).mean())


def view_taken_before_the_write(x: torch.Tensor, w: torch.Tensor) -> Any:
    out = torch.zeros(8, 16)
    row = out[1]
    out.copy_(F.linear(x, w))
    return row, out.t()


def detached_and_written_later(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = F.linear(x, w).detach().clone()
    h[0] = F.linear(x, w)[1]
    return h


def written_without_and_with_a_gradient(x: torch.Tensor, w: torch.Tensor) -> Any:
    out = torch.zeros(8, 16)
    with torch.no_grad():
        out[0] = F.linear(x, w)[0]
    out[1] = F.linear(x, w)[1]
    return out


def filled_by_index(x: torch.Tensor, w: torch.Tensor) -> Any:
    rows = torch.tensor([3, 1])
    h = F.linear(x, w)
    one = torch.zeros(8, 16).index_add_(0, rows, h[:2])
    two = torch.zeros(8, 16)
    two[rows] = h[2:4]
    three = torch.zeros(8, 16)
    three.scatter_(0, torch.zeros(1, 16, dtype=torch.int64), h[:1])
    return one, two, three, torch.zeros(8, 16).index_copy_(0, rows, h[4:6])


def operand_of_cond(x: torch.Tensor, w: torch.Tensor) -> Any:
    out = torch.zeros(8, 16)
    out[:4] = F.linear(x, w)[4:]
    return torch.cond(x.sum() > 0, lambda t: t * 2, lambda t: t.sin(), (out,))


def overlapping_view_of_an_input(x: torch.Tensor, w: torch.Tensor) -> Any:
    return x.unfold(-1, 2, 1), x @ w


def overlapping_view_of_a_result(x: torch.Tensor, w: torch.Tensor) -> Any:
    return F.linear(x, w).as_strided((8, 8), (16, 1)), F.linear(x, w).as_strided((9, 9), (1, 1))


def expanded(x: torch.Tensor, w: torch.Tensor) -> Any:
    return x[:1].expand(8, 16), F.linear(x, w)[:, :1].expand(8, 16)


PROGRAMS: list[Program] = [
    slice_of_zeros, losses_by_index, rows_in_a_loop, filled_by_a_number,
    view_taken_before_the_write, detached_and_written_later, written_without_and_with_a_gradient,
    filled_by_index, operand_of_cond, overlapping_view_of_an_input, overlapping_view_of_a_result,
    pytest.param(expanded, marks=not_on("2.12", "AOTAutograd writes to an expanded gradient")),
]  # fmt: skip


@SETTINGS
@pytest.mark.parametrize("program", PROGRAMS)
def test_returned_in_every_way(program: Any, level: str, emit: str) -> None:
    check(program, leaf(8, 16), leaf(16, 16), level=level, emit=emit)


@SETTINGS
def test_a_cache_filled_with_what_is_differentiable(level: str, emit: str) -> None:
    """The caller's tensor has no gradient until the graph writes to it; then it has a true one."""

    def program(cache: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        h = F.linear(x, w)
        cache[:4] = h[4:]
        return h + cache

    check(program, torch.randn(8, 16), leaf(8, 16), leaf(16, 16), level=level, emit=emit)
    # A gradient that comes back through the cache alone.
    x, w = leaf(8, 16), leaf(16, 16)
    found = []
    options = {"dtype": torch.float16, "level": level, "emit": emit, "loss_scale": 1024.0}
    for run in (program, mpcompile(program, strict=True, **options)):
        cache = torch.zeros(8, 16)
        run(cache, x, w)
        assert cache.requires_grad
        found.append(torch.autograd.grad(cache.square().mean(), [x, w]))
    for wanted, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-2, atol=1e-4)


def test_without_the_fix_the_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask what a tensor was when it was made, as the pass once did: no such graph is emitted."""

    def as_made(self: Any, node: fx.Node, reader: fx.Node) -> bool:
        return ir.requires_grad(node)

    monkeypatch.setattr(scaling._Scaler, "tracked", as_made)
    reason = fallback_reason(slice_of_zeros, leaf(8, 16), leaf(16, 16))
    assert "would carry scale^-1" in reason


@pytest.mark.parametrize(
    "program",
    [
        *PROGRAMS,
        lambda x, w: F.linear(F.linear(x, w).exp(), w) + x,
        lambda x, w: F.linear(Clip.apply(F.linear(x, w)), w),  # of an unknown backward
    ],
)
def test_each_scaling_node_matters(program: Any) -> None:
    """Whichever of them is left out, the proof fails."""

    def stage() -> Stage:
        return ran(clean, program, leaf(8, 16), leaf(16, 16), scaled=True)

    whole = stage()
    assert not complaints(whole.gm)
    library = torch.ops.mpcompile
    targets = (library.scale_grad.default, library.unscale_grad.default)
    names = [node.name for node in whole.gm.graph.nodes if node.target in targets]
    assert len(names) > 1
    for name in names:
        broken = stage()
        node = broken.node(name)
        node.replace_all_uses_with(node.all_input_nodes[0])
        broken.gm.graph.erase_node(node)
        assert complaints(broken.gm), name


def test_a_gradient_that_is_missing_is_no_zero() -> None:
    """After both operators, whose backwards would otherwise get zeros in its place."""
    Cut = function_of(lambda ctx, x: x.clone(), lambda ctx, grad: None)

    x, y = leaf(4), leaf(4)
    scale, found = torch.tensor(2.0), torch.zeros(1)
    scaled = torch.ops.mpcompile.scale_grad(Cut.apply(x), scale)
    unscaled = torch.ops.mpcompile.unscale_grad(y, scale, found)
    (scaled.sum() + Cut.apply(torch.ops.mpcompile.scale_grad(unscaled, scale)).sum()).backward()
    assert (x.grad, y.grad) == (None, None)
    assert not found
