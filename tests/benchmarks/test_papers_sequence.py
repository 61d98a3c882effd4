"""benchmarks papers: speech recognition and machine translation."""

import itertools
import math
import random
from typing import cast

import pytest
import torch

from benchmarks.papers.tasks import grammar, translation
from benchmarks.papers.tasks.grammar import (
    NOUNS,
    Clause,
    NounPhrase,
    draw_clause,
    source_of,
    target_of,
)
from benchmarks.papers.tasks.speech import (
    BLANK,
    FRAMES,
    LETTERS,
    PITCHES,
    DeepSpeech,
    Utterances,
    distance,
    frames_out,
    spelled,
    utterances,
)
from benchmarks.papers.tasks.speech import greedy as heard

CPU = torch.device("cpu")


# -- speech ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def few() -> Utterances:
    return utterances(40)


def test_utterances(few: Utterances) -> None:
    """Each says something of its own; frames count up to the end, and after it is nothing."""
    assert few.spectrograms.shape == (40, PITCHES, FRAMES)
    said = [spelled(row) for row in few.labels]
    assert len(set(said)) == 40
    assert [len(text) for text in said] == few.letters.tolist()
    for spectrogram, frames in zip(few.spectrograms, few.frames.tolist(), strict=True):
        assert torch.equal(spectrogram[:, frames:], torch.zeros(PITCHES, FRAMES - frames))
        part = spectrogram[:, :frames]
        assert part.mean().item() == pytest.approx(0, abs=1e-4)
        assert part.square().mean().item() == pytest.approx(1, abs=1e-4)


def test_letters_fit_into_the_frames_that_are_left(few: Utterances) -> None:
    """CTC needs a frame for each letter, and a blank between two that are equal."""
    doubled = [sum(a == b for a, b in itertools.pairwise(spelled(row))) for row in few.labels]
    assert (few.letters + torch.tensor(doubled) <= frames_out(few.frames)).all()


def test_frames_out_are_those_of_the_network(few: Utterances) -> None:
    net = DeepSpeech().eval()
    found = net(few.spectrograms[:2], few.frames[:2])
    assert found.shape == (int(frames_out(torch.tensor(FRAMES))), 2, 1 + len(LETTERS))
    torch.testing.assert_close(found.exp().sum(2), torch.ones(found.shape[:2]))


def test_what_lies_after_the_end_is_not_heard(few: Utterances) -> None:
    """Past the first convolution, which overlaps the end by its padding as with silence."""
    net = DeepSpeech().eval()
    frames = torch.tensor([FRAMES // 2])
    one = few.spectrograms[:1].clone()
    other = one.clone()
    other[:, :, FRAMES // 2 + 8 :] += 5
    torch.testing.assert_close(net(one, frames), net(other, frames))
    assert not torch.equal(net(one, frames * 2), net(other, frames * 2))


def test_greedy_collapses_runs_and_leaves_blanks_out() -> None:
    a, d = LETTERS.index("a") + 1, LETTERS.index("d") + 1
    best = torch.tensor([[BLANK, a, a, BLANK, a, d, d, a], [d, d, BLANK, BLANK, a, a, a, a]])
    rows = torch.nn.functional.one_hot(best, 1 + len(LETTERS)).float().transpose(0, 1)
    assert heard(rows, torch.tensor([8, 4])) == ["aada", "d"]


def test_distance() -> None:
    assert distance("kitten", "sitting") == 3  # two substitutions and an insertion
    assert distance("", "abc") == distance("abc", "") == 3
    assert distance("abc", "abc") == 0
    assert distance("abcd", "acbd") == 2
    words = ["".join(w) for n in range(4) for w in itertools.product("ab", repeat=n)]
    for one, other, third in itertools.product(words, repeat=3):
        assert distance(one, other) == distance(other, one)
        assert distance(one, other) <= distance(one, third) + distance(third, other)


# -- translation ----------------------------------------------------------------------------------


def noun(word: str) -> NounPhrase:
    (found,) = (noun for noun in NOUNS if noun.word == word)
    return NounPhrase(found, False, "", (), None)


def test_agreement_follows_the_subject_over_a_relative_clause() -> None:
    """The target's verb comes last, and agrees with a subject that stands far off."""
    dog, tree = noun("dog"), noun("tree")
    subject = NounPhrase(dog.noun, True, "two", ("big",), ("see", tree))
    clause = Clause(subject, "know", noun("man"), negated=True, adverb="often")
    said = "two big dog -s that see the tree know not the man often"
    assert " ".join(source_of(clause)) == said
    target = target_of(clause)
    suffixes = [token for token in target if token.startswith("-")]
    gender, other = dog.noun.gender, tree.noun.gender
    assert (gender, other) == ("m", "m")
    expected = ["-accsg", "-vmpl", "-nompl", "-mpl", "-mpl", "-persg", "-vmpl"]
    assert suffixes == expected
    assert target.index("ki") == 4  # after the relative clause: a noun and a verb, each marked
    assert target[-3] == "ne"


def test_a_verb_has_two_senses() -> None:
    def verb_of(verb: str, object: str) -> str:
        return target_of(Clause(noun("man"), verb, noun(object), False, ""))[-2]

    assert verb_of("know", "dog") == verb_of("know", "queen") != verb_of("know", "road")
    assert verb_of("see", "dog") == verb_of("see", "road")


def test_words_of_the_target_are_distinct() -> None:
    """As many stems as the source has that are translated, and a second sense for each of four."""
    data = translation.corpus()
    target = {word for word in data.target_words[3:] if not word.startswith("-")} - {"ne", "ki"}
    source = set(data.source_words[3:]) - {"-s", "the", "that", "not"}
    assert len(target) == len(source) + 4


def test_a_source_has_one_translation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few words, so that the same source is drawn again and again."""
    for words, count in (("NOUNS", 2), ("VERBS", 1), ("ADJECTIVES", 2), ("ADVERBS", 1)):
        monkeypatch.setattr(grammar, words, getattr(grammar, words)[:count])
    draws = random.Random(5)
    seen: dict[tuple[str, ...], list[str]] = {}
    for _ in range(3000):
        clause = draw_clause(draws)
        assert seen.setdefault(tuple(source_of(clause)), target_of(clause)) == target_of(clause)
    assert len(seen) < 2900


def test_corpus() -> None:
    data = translation.corpus()
    assert len({tuple(row) for row in data.sources.tolist()}) == len(data.sources) == 16_000
    for rows in (data.sources, data.targets):
        ended = (rows == translation.END).int().cumsum(1) > 0
        assert (ended[:, -1]).all()
        assert torch.equal(rows == translation.PAD, ended & (rows != translation.END))
    assert (data.targets[:, 0] == translation.BEGIN).all()
    row = torch.tensor([translation.BEGIN, 5, 7, translation.END, 9])
    assert (
        translation.words_of(row, data.target_words)
        == f"{data.target_words[5]} {data.target_words[7]}"
    )


def translators(
    data: translation.Corpus,
) -> list[translation.LSTMTranslator | translation.Transformer]:
    torch.manual_seed(0)
    sizes = len(data.source_words), len(data.target_words)
    return [translation.LSTMTranslator(*sizes).eval(), translation.Transformer(*sizes).eval()]


@pytest.mark.slow("a benchmark's own test, which runs it small")
@torch.no_grad()
def test_no_word_sees_those_after_it() -> None:
    sources, targets = translation.corpus()[:3]
    changed = targets.clone()
    changed[:, 5:] = translation.BEGIN
    for net in translators(translation.corpus()):
        one, other = net(sources, targets), net(sources, changed)
        torch.testing.assert_close(one[:, :5], other[:, :5])
        assert not torch.allclose(one[:, 5], other[:, 5])


@torch.no_grad()
def test_the_transformer_reads_no_padding() -> None:
    sources, targets = translation.corpus()[:3]
    net = translators(translation.corpus())[1]
    longer = torch.cat([sources, torch.full((3, 4), translation.PAD)], 1)
    torch.testing.assert_close(net(sources, targets), net(longer, targets))


@torch.no_grad()
def test_attention_of_the_lstm_reads_no_padding() -> None:
    """Whatever the encoder leaves there."""
    sources, targets = translation.corpus()[:3]
    net = cast(translation.LSTMTranslator, translators(translation.corpus())[0])
    read, padding = net.encode(sources)
    assert padding.any()
    other = read.masked_fill(padding.transpose(1, 2), 9.0)
    expected = net.decode(read, padding, targets)
    torch.testing.assert_close(net.decode(other, padding, targets), expected)


@torch.no_grad()
def test_greedy_is_what_forward_would_choose() -> None:
    sources = translation.corpus().sources[:3]
    for net in translators(translation.corpus()):
        found = translation.greedy(net, sources, 6)
        before = torch.cat([torch.full((3, 1), translation.BEGIN), found[:, :-1]], 1)
        assert torch.equal(net(sources, before).argmax(2), found)


def test_sinusoids() -> None:
    found = translation.sinusoids(5, 6)
    for position, column in itertools.product(range(5), range(6)):
        angle = position / 10_000 ** (column // 2 * 2 / 6)
        expected = math.cos(angle) if column % 2 else math.sin(angle)
        assert found[position, column].item() == pytest.approx(expected, abs=1e-5)


def test_noam_rises_in_a_line_and_falls_as_the_inverse_root() -> None:
    assert [translation.noam(4, step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert translation.noam(4, 15) == 0.5


def test_bleu() -> None:
    """Five words of which the last differs: 4/5, 3/4, 2/3, 1/2 of the n-grams are right."""
    assert translation.bleu(["a b c d x"], ["a b c d e"]) == pytest.approx(100 * (1 / 5) ** 0.25)
    assert translation.bleu(["a b c d"], ["a b c d"]) == pytest.approx(100)
    # Shorter than it should be: every n-gram is right, and the penalty is exp(1 - 8 / 4).
    assert translation.bleu(["a b c d"], ["a b c d e f g h"]) == pytest.approx(100 * math.exp(-1))
