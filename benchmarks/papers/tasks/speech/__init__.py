"""Speech recognition: a Deep Speech 2 on synthesised utterances.

The architecture is that of "Deep Speech 2: End-to-End Speech Recognition in English and Mandarin"
(Amodei et al., 2015): convolutions over time and frequency with batch norm and ReLU clipped at 20,
bidirectional GRUs with batch norm over the sequence between them, a linear layer, and the CTC loss;
trained by SGD with Nesterov momentum and clipped gradients.
"""

from __future__ import annotations

from .train import DEEP_SPEECH

__all__ = ["DEEP_SPEECH"]
