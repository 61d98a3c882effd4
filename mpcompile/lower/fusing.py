"""What gains by being compiled, in a graph around an RNN of which nothing runs in the low dtype.

The RNN runs on the device's own kernel whatever is done with the rest, and a compiled piece costs a
call of its own in the forward and in the backward. What it gains is that its elementwise operators,
fused, don't write each result to memory. So an embedding or a linear layer beside an RNN is faster
op by op, a sampled softmax after it or masked convolutions before it are faster compiled (on a
CPU: `python -m benchmarks run peers`, the LSTM with attention, the big LSTM, Deep Speech 2).

A dropout after an RNN is faster op by op, too: Inductor's C++ draws random numbers one at a time,
torch's kernel many (torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import fx

from .. import ir
from ..rules import RNN_OPS

aten = torch.ops.aten

_LEAST = 1 << 20
"""Bytes of results of elementwise operators: so that writing them costs more than a call."""


def gains(piece: Iterable[fx.Node]) -> bool:
    """Whether these operators, which would be compiled together, are faster so."""
    written = 0
    for node in filter(ir.is_op, piece):
        value = ir.tensor(node)
        if value is not None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
            written += math.prod(map(ir.hint, value.shape)) * value.element_size()
    return written >= _LEAST


def is_apart(node: fx.Node) -> bool:
    """Whether an operator is a dropout of what an RNN returns."""
    if node.target is not aten.dropout.default:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and any(n.target in RNN_OPS for n in source.all_input_nodes)
