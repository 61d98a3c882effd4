"""Padding inside of checkpoints, behind writes in place, and on the way of gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import SETTINGS, check, leaf
from exact import assert_exact
from padded_graphs import Chain, pads_of_weights, placed
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from mpcompile import ir
from mpcompile.passes.graph.outline import outline
from mpcompile.passes.graph.scale_gradients import scale_gradients


class Checkpointed(nn.Module):
    """A chain that is recomputed, of weights that are cast and padded inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(16, 13), nn.Linear(13, 21), nn.Linear(21, 13)

    def forward(self, x: Tensor) -> Tensor:
        def body(h: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(h))).relu()

        h: Tensor = checkpoint(body, self.first(x), use_reentrant=False)
        return self.up(h)


def test_inside_a_checkpoint() -> None:
    stage = placed(Checkpointed(), torch.randn(8, 16), until=outline)
    (body,) = [m for _, m in stage.gm.named_children() if isinstance(m, fx.GraphModule)]
    inside = [n for n in body.graph.nodes if ir.is_op(n)]
    linear = [n for n in inside if ir.op_name(n) == "aten::linear"]
    assert [tuple(ir.shape(n)) for n in linear] == [(8, 24), (8, 16)]
    assert [ir.op_name(n) for n in inside].count("aten::slice") == 0  # goes on padded behind it
    assert_exact(Checkpointed(), torch.randn(8, 16))


@SETTINGS
@pytest.mark.parametrize("reader", [F.relu, lambda h: h, lambda h: h.softmax(-1)])
def test_gradients_are_true_to_size(reader: Any, level: str, emit: str) -> None:
    """A cut is handed to the caller: it is where gradients enter, and where they are scaled."""
    net = Chain(torch.sigmoid)
    check(lambda x: reader(net(x)), leaf(8, 257), level=level, emit=emit, pad="always")


@SETTINGS
def test_gradients_of_a_checkpoint(level: str, emit: str) -> None:
    check(Checkpointed(), torch.randn(8, 16), level=level, emit=emit, pad="always")


def test_a_value_that_is_written_in_place() -> None:
    """`y` is padded anew behind each write."""

    def program(x: Tensor, y: Tensor) -> Any:
        y = y * 2
        a = x.mm(y)
        y.add_(1)
        b = x.mm(y)
        y[:, :3] = 0
        return a, b, x.mm(y), y

    assert_exact(program, torch.randn(8, 13), torch.randn(13, 21))

    def written(x: Tensor, w: Tensor) -> Any:
        h = F.linear(x, w)
        h[:, 1:4] = 7
        h.view(-1).mul_(2)
        g = F.linear(x, w).relu_()
        return h, F.linear(h, w.t()), g.sum(), F.linear(g, w.t())

    assert_exact(written, torch.randn(8, 13), torch.randn(21, 13))


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_are_scaled_on_the_other_side_of_pads(scaled: bool) -> None:
    stage = placed(Chain(), torch.randn(8, 257), until=scale_gradients, scaled=scaled)
    for node in pads_of_weights(stage):
        assert ir.mark(node.all_input_nodes[0]).rule == "cast"
