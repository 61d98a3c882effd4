"""Spoken utterances, synthesised: letters are moving formants, words come from a lexicon.

A letter is a tone of three formants that glide from one place to another, or a hiss, and lasts 80
to 140 ms. A speaker has a pitch, a length of the vocal tract that moves all formants, a tempo and a
background noise. What a network reads is the log spectrogram.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["BLANK", "FRAMES", "LETTERS", "PITCHES", "Utterances", "spelled", "utterances"]

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
