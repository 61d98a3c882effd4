"""An LSTM that reads, an LSTM that writes, and attention between them.

The encoder reads both ways, and the decoder starts from where its backward half ends, as in "Neural
Machine Translation by Jointly Learning to Align and Translate" (Bahdanau et al., 2014). Attention
is global, scored by a matrix, and comes behind the decoder's LSTM, as in "Effective Approaches to
Attention-based Neural Machine Translation" (Luong et al., 2015), without feeding its result back:
so a whole sentence goes through the decoder in one call.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .corpus import PAD

__all__ = ["LSTMTranslator"]


class LSTMTranslator(nn.Module):
    """Sources (B, S), what was written so far (B, T) -> logits of what follows (B, T, words)."""

    def __init__(self, source_words: int, target_words: int, width: int = 80) -> None:
        super().__init__()
        embedded, half = width // 2, width // 2
        self.sources = nn.Embedding(source_words, embedded, padding_idx=PAD)
        self.targets = nn.Embedding(target_words, embedded, padding_idx=PAD)
        self.reader = nn.LSTM(embedded, half, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(half, width)
        self.writer = nn.LSTM(embedded, width, batch_first=True)
        self.score = nn.Linear(width, width, bias=False)
        self.join = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, target_words)

    def forward(self, sources: Tensor, written: Tensor) -> Tensor:
        return self.decode(*self.encode(sources), written)

    def encode(self, sources: Tensor) -> tuple[Tensor, Tensor]:
        """What was read (B, S, width), and where there is padding (B, 1, S)."""
        read: Tensor = self.reader(self.sources(sources))[0]
        return read, (sources == PAD).unsqueeze(1)

    def decode(self, read: Tensor, padding: Tensor, written: Tensor) -> Tensor:
        backward_end = read[:, 0, read.shape[2] // 2 :]
        start = torch.tanh(self.bridge(backward_end)).unsqueeze(0)
        states, _ = self.writer(self.targets(written), (start, torch.zeros_like(start)))
        scores = self.score(states) @ read.transpose(1, 2)
        weights = scores.masked_fill(padding, float("-inf")).softmax(2)
        logits: Tensor = self.head(torch.tanh(self.join(torch.cat([weights @ read, states], 2))))
        return logits
