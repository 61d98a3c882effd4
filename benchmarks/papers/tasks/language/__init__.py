"""Language models: of words, and of characters."""

from __future__ import annotations

from .characters import GPT_AS_AVERAGED, GPT_TASK
from .words import BIG_LSTM, BIG_LSTM_AS_AVERAGED

__all__ = ["BIG_LSTM", "BIG_LSTM_AS_AVERAGED", "GPT_AS_AVERAGED", "GPT_TASK"]
