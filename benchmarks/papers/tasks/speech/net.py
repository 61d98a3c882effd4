"""The network: spectrograms to the log probabilities of labels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .data import BLANK, LETTERS, PITCHES

__all__ = ["DeepSpeech", "frames_out"]

_CONVOLUTIONS = (((9, 7), (2, 2)), ((7, 5), (2, 2)), ((5, 5), (2, 1)))
"""Kernel and stride, of frequency and of time."""


def frames_out(frames: Tensor) -> Tensor:
    """How many frames the network makes of these, elementwise."""
    for _, (_, stride) in _CONVOLUTIONS:
        frames = (frames + stride - 1) // stride
    return frames


class _Convolution(nn.Module):
    """Convolution, batch norm, ReLU clipped at 20, and zeros behind the end."""

    def __init__(
        self, inputs: int, channels: int, kernel: tuple[int, int], stride: tuple[int, int]
    ) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2)
        self.stride = stride[1]
        self.convolution = nn.Conv2d(inputs, channels, kernel, stride, padding, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.clipped = nn.Hardtanh(0, 20)

    def forward(self, x: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        x = self.clipped(self.norm(self.convolution(x)))
        frames = (frames + self.stride - 1) // self.stride
        behind = torch.arange(x.shape[3], device=x.device) >= frames.unsqueeze(1)
        return x.masked_fill(behind[:, None, None], 0), frames


class _Recurrent(nn.Module):
    """Batch norm over batch and time of (B, T, inputs), then a GRU both ways."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(inputs)
        self.gru = nn.GRU(inputs, width, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x.flatten(0, 1)).view_as(x)
        both: Tensor = self.gru(normed)[0]
        return both


class DeepSpeech(nn.Module):
    """Spectrograms (B, PITCHES, T) and frames (B,) -> log probabilities (T / 4, B, labels)."""

    def __init__(self, channels: int = 8, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        inputs = [1, channels, channels]
        self.convolutions = nn.ModuleList(
            _Convolution(i, channels, *how) for i, how in zip(inputs, _CONVOLUTIONS, strict=True)
        )
        pitches = PITCHES
        for _, (stride, _) in _CONVOLUTIONS:
            pitches //= stride
        inputs = [channels * pitches, *[2 * width] * (layers - 1)]
        self.recurrent = nn.ModuleList(_Recurrent(i, width) for i in inputs)
        self.norm = nn.BatchNorm1d(2 * width)
        self.head = nn.Linear(2 * width, BLANK + 1 + len(LETTERS))

    def forward(self, spectrograms: Tensor, frames: Tensor) -> Tensor:
        x = spectrograms.unsqueeze(1)
        for convolution in self.convolutions:
            x, frames = convolution(x, frames)
        x = x.flatten(1, 2).transpose(1, 2)
        for layer in self.recurrent:
            x = layer(x)
        logits = self.head(self.norm(x.flatten(0, 1)).view_as(x))
        return logits.transpose(0, 1).log_softmax(2)
