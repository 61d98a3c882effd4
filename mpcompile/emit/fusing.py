"""What gains by being compiled, in a graph around an RNN of which nothing runs in the low dtype.

The RNN runs on the device's own kernel whatever is done with the rest, and a compiled piece costs a
call of its own in the forward and in the backward. What it gains is that its elementwise operators,
fused, don't write each result to memory. So an embedding or a linear layer beside an RNN is faster
op by op, a sampled softmax behind it or masked convolutions before it are faster compiled (on a
CPU: `python -m benchmarks run peers`, the LSTM with attention, the big LSTM, Deep Speech 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import fx

from .. import ir

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
