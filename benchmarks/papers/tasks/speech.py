"""Speech recognition: a Deep Speech 2 on synthesised utterances.

The architecture is that of "Deep Speech 2: End-to-End Speech Recognition in English and Mandarin"
(Amodei et al., 2015): convolutions over time and frequency with batch norm and ReLU clipped at 20,
bidirectional GRUs with batch norm over the sequence between them, a linear layer, and the CTC loss;
trained by SGD with Nesterov momentum and clipped gradients.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.ways import Trainer
from benchmarks.papers.task import Metrics, OneModel, Task

# -- data ------------------------------------------------------------------------------------------
# Spoken utterances, synthesised: letters are moving formants, words come from a lexicon.
#
# A letter is a tone of three formants that glide from one place to another, or a hiss, and lasts
# 80 to 140 ms. A speaker has a pitch, a length of the vocal tract that moves all formants, a
# tempo and a background noise. What a network reads is the log spectrogram.

BLANK = 0
"""CTC's."""
SPACE, VOWELS, CONSONANTS = " ", "aeiou", "dklmnrsty"
LETTERS = SPACE + VOWELS + CONSONANTS
"""Letter i is label i + 1."""
HISSES = "kst"
LONGEST = 11
"""Letters of an utterance, with spaces."""
RATE, WINDOW, HOP = 8000, 160, 80
"""Samples a second; samples of a window and between two: 20 ms and 10 ms."""
FRAMES, PITCHES = 144, WINDOW // 2
CONTROL = 40
"""Samples between two values of a formant's track."""


@dataclasses.dataclass(frozen=True)
class Utterances:
    """N utterances.

    Attributes:
        spectrograms: (N, PITCHES, FRAMES), FP32, mean 0 and variance 1 over the frames of an
            utterance; 0 behind its end.
        frames: (N,), int64, how many frames it lasts.
        labels: (N, LONGEST), int64; BLANK behind its end.
        letters: (N,), int64, how many labels it has.
    """

    spectrograms: Tensor
    frames: Tensor
    labels: Tensor
    letters: Tensor

    def __getitem__(self, chosen: Tensor | slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (
            self.spectrograms[chosen], self.frames[chosen], self.labels[chosen],
            self.letters[chosen],
        )  # fmt: skip


def spelled(labels: Tensor) -> str:
    """The letters of a row of labels; blanks are left out."""
    return "".join(LETTERS[label - 1] for label in labels.tolist() if label != BLANK)


@functools.cache
def utterances(count: int = 1900) -> Utterances:
    """No two of them say the same."""
    generator = torch.Generator().manual_seed(2015)
    labels = torch.zeros(count, LONGEST, dtype=torch.long)
    for row, text in zip(labels, _texts(count, generator), strict=True):
        row[: len(text)] = torch.tensor([LETTERS.index(letter) + 1 for letter in text])
    tables = _letters(generator)
    parts = [_spoken(part, tables, generator) for part in labels.split(200)]
    spectrograms, frames = (torch.cat(kind) for kind in zip(*parts, strict=True))
    return Utterances(spectrograms, frames, labels, (labels != BLANK).sum(1))


def _texts(count: int, generator: torch.Generator) -> list[str]:
    """Two or three words each, of a lexicon of 250 in which vowels and consonants take turns."""

    def draw(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    def word() -> str:
        kinds = (VOWELS, CONSONANTS)
        first = draw(2)
        turns = [kinds[(first + i) % 2] for i in range(2 + draw(3))]
        return "".join(kind[draw(len(kind))] for kind in turns)

    words: dict[str, None] = {}
    while len(words) < 250:
        words[word()] = None
    lexicon, texts = [*words], dict[str, None]()
    while len(texts) < count:
        text = SPACE.join(lexicon[draw(len(lexicon))] for _ in range(2 + draw(2)))
        if len(text) <= LONGEST:
            texts[text] = None
    return [*texts]


@dataclasses.dataclass(frozen=True)
class _Letters:
    """By label: formants in Hz at a letter's begin and end (2, 3), loudness of tone and hiss."""

    formants: Tensor
    tone: Tensor
    hiss: Tensor


def _letters(generator: torch.Generator) -> _Letters:
    """A vowel stays where it is; a consonant glides, and is softer."""
    labels = len(LETTERS) + 1
    low, high = torch.tensor([250.0, 900, 2300]), torch.tensor([850.0, 2200, 3400])
    formants = low + (high - low) * torch.rand(labels, 2, 3, generator=generator)
    tone, hiss = torch.zeros(labels), torch.zeros(labels)
    for label, letter in enumerate(LETTERS, 1):
        if letter in VOWELS:
            formants[label, 1] = formants[label, 0]
        tone[label] = {SPACE: 0.0, **dict.fromkeys(VOWELS, 1.0)}.get(letter, 0.6)
        hiss[label] = 0.5 if letter in HISSES else 0.0
    return _Letters(formants, tone, hiss)


def _spoken(labels: Tensor, letters: _Letters, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Spectrograms and frames of labels (N, LONGEST)."""
    count, samples = len(labels), FRAMES * HOP

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    seconds = uniform(0.08, 0.14, LONGEST) * uniform(0.85, 1.1, 1) * (labels != BLANK)
    ends = 0.02 + seconds.cumsum(1)
    times = (torch.arange(samples // CONTROL) * CONTROL / RATE).expand(count, -1).contiguous()
    at = torch.searchsorted(ends, times).clamp(max=LONGEST - 1)
    said = labels.gather(1, at)
    through = 1 - (ends.gather(1, at) - times) / seconds.gather(1, at).clamp(min=1e-3)
    through = through.clamp(0, 1)  # of a letter: 0 at its begin, 1 at its end
    swell = torch.sin(math.pi * through).clamp(min=0).sqrt()
    begin, end = letters.formants[said].unbind(2)
    glide = (begin + (end - begin) * through.unsqueeze(2)) * uniform(0.9, 1.1, 1, 1)
    loudness = torch.stack([letters.tone[said] * swell, letters.hiss[said] * swell], 2)
    tracks = torch.cat([glide, uniform(90, 220, 1, 1).expand(-1, len(at[0]), 1), loudness], 2)
    tracks = F.interpolate(tracks.transpose(1, 2), size=samples, mode="linear")
    waves = torch.sin(tracks[:, :4].cumsum(2) * (2 * math.pi / RATE))
    voice = (waves[:, :3] * torch.tensor([1.0, 0.6, 0.3]).view(3, 1)).sum(1)
    noise = torch.randn(count, samples, generator=generator)
    heard = tracks[:, 4] * voice * (1 + 0.6 * waves[:, 3])
    heard += noise * (tracks[:, 5] + uniform(0.2, 1.2, 1))
    return _spectrograms(heard, ends[:, -1])


def _spectrograms(sound: Tensor, seconds: Tensor) -> tuple[Tensor, Tensor]:
    """Of sound (N, FRAMES * HOP) of which `seconds` (N,) count."""
    spectrum = torch.stft(sound, WINDOW, HOP, window=torch.hann_window(WINDOW), return_complex=True)
    logs = spectrum[:, :PITCHES, :FRAMES].abs().square().add(1e-3).log()
    frames = (seconds * RATE / HOP).ceil().long().clamp(max=FRAMES)
    counts = (torch.arange(FRAMES) < frames.unsqueeze(1)).unsqueeze(1)  # (N, 1, FRAMES)
    size = (frames * PITCHES).view(-1, 1, 1)
    centred = (logs - (logs * counts).sum((1, 2), keepdim=True) / size) * counts
    return centred / (centred.square().sum((1, 2), keepdim=True) / size).sqrt(), frames


# -- net -------------------------------------------------------------------------------------------
# The network: spectrograms to the log probabilities of labels.

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


# -- train -----------------------------------------------------------------------------------------
# Training by CTC, greedy decoding, and the rate of wrong characters.

BATCH = 12
HELD_OUT = 400
STEPS = 400


def greedy(log_probabilities: Tensor, frames: Tensor) -> list[str]:
    """The best label of each frame; runs become one label, then blanks go.

    Args:
        log_probabilities: (T, B, labels).
        frames: (B,), how many of the T frames count.
    """
    best = log_probabilities.argmax(2).t().cpu()
    return [
        spelled(torch.unique_consecutive(row[:count]))
        for row, count in zip(best, frames.tolist(), strict=True)
    ]


def distance(one: Sequence[object], other: Sequence[object]) -> int:
    """The fewest insertions, deletions and substitutions that make one of the other."""
    above = [*range(len(other) + 1)]
    for i, mine in enumerate(one, 1):
        row = [i]
        for j, theirs in enumerate(other, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (mine != theirs)))
        above = row
    return above[-1]


class _Training(OneModel):
    def __init__(self, trainer: Trainer, seed: int) -> None:
        sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
        falling = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=STEPS)
        super().__init__(trainer, seed, DeepSpeech(), sgd, max_grad_norm=1.0, schedule=falling)

    def _draw(self, seed: int) -> Iterator[list[Tensor]]:
        data = utterances()
        return self._shuffled(seed, data, len(data.frames), HELD_OUT, BATCH)

    def _loss(
        self, spectrograms: Tensor, frames: Tensor, labels: Tensor, letters: Tensor
    ) -> Tensor:
        found = self._net(spectrograms, frames)
        return F.ctc_loss(found, labels, frames_out(frames), letters, BLANK)

    @torch.no_grad()
    def judge(self) -> Metrics:
        spectrograms, frames, labels, letters = (
            part.to(self._device) for part in utterances()[:HELD_OUT]
        )
        self._net.eval()
        found = self._net.forward(spectrograms, frames)
        self._net.train()
        loss = F.ctc_loss(found, labels, frames_out(frames), letters, BLANK).item()
        said = [spelled(row) for row in labels.cpu()]
        heard = greedy(found, frames_out(frames))
        wrong = sum(distance(a, b) for a, b in zip(heard, said, strict=True))
        return {"held-out loss": loss, "wrong characters, %": 100 * wrong / int(letters.sum())}


DEEP_SPEECH = Task(
    name="Deep Speech 2",
    claim="speech recognition",
    data="generated: words spoken by gliding formants, with speakers and noise",
    metric="wrong characters, %",
    higher=False,
    steps=STEPS,
    start=_Training,
)
