"""Translation, between two languages that a grammar makes: an LSTM and a transformer."""

from __future__ import annotations

from .train import LSTM_ATTENTION, TRANSFORMER, TRANSFORMER_AS_AVERAGED

__all__ = ["LSTM_ATTENTION", "TRANSFORMER", "TRANSFORMER_AS_AVERAGED"]
