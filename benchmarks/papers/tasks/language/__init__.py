"""Language models: of words, and of characters."""

from __future__ import annotations

from .characters import GPT_TASK
from .words import BIG_LSTM

__all__ = ["BIG_LSTM", "GPT_TASK"]
