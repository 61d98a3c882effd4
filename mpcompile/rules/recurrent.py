"""The recurrent operators, which run on the device's own kernel."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

RNN_OPS: frozenset[Any] = frozenset(
    getattr(packet, overload)
    for packet in (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu)
    for overload in ("input", "data")  # padded, packed
)

# As Dynamo names them, in the graph that capture replays; one that could not be captured comes to
# `emit` so.
PACKETS: dict[Any, Any] = {
    torch.lstm: aten.lstm,
    torch.gru: aten.gru,
    torch.rnn_tanh: aten.rnn_tanh,
    torch.rnn_relu: aten.rnn_relu,
}
