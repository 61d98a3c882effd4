"""A pair of languages: sentences of a context-free grammar, and what each means in the other.

The source puts its subject before the verb and its object behind it; adjectives stand before their
noun, relative clauses behind it, and suffix tokens mark a plural. The target
* puts the verb last, an adverb before it, adjectives behind their noun, a relative clause before
  it;
* marks nouns for case and number; an object that is alive has a case of its own;
* lets adjectives and numbers agree with the gender and the number of their noun, verbs with those
  of their subject;
* negates by a token before the verb;
* has two words for some verbs, by whether the object is alive.
So what stands at a place in the target depends on words far off in the source.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Noun:
    """A source word, its translation's gender, and whether it is alive."""

    word: str
    gender: str
    alive: bool


@dataclasses.dataclass(frozen=True)
class NounPhrase:
    """number: a numeral, "" where there is none; clause: (its verb, its object), or None."""

    noun: Noun
    plural: bool
    number: str
    adjectives: tuple[str, ...]
    clause: tuple[str, NounPhrase] | None


@dataclasses.dataclass(frozen=True)
class Clause:
    """A sentence; the empty string where it has no adverb."""

    subject: NounPhrase
    verb: str
    object: NounPhrase
    negated: bool
    adverb: str


_ALIVE = "man woman child dog cat bird horse king queen sailor baker fox"
_THINGS = "house boat river tree stone book lamp road bread garden song door"
NOUNS = tuple(
    Noun(word, "mfn"[i % 3], alive)
    for words, alive in ((_ALIVE, True), (_THINGS, False))
    for i, word in enumerate(words.split())
)
VERBS = ("see", "find", "know", "want", "love", "take", "follow", "leave", "watch", "paint")
BY_LIFE = frozenset({"know", "take", "leave", "follow"})
"""Verbs with one translation for an object that is alive, and another for things."""
ADJECTIVES = ("big", "small", "old", "new", "red", "white", "quiet", "strange", "happy", "cold")
NUMBERS = ("two", "three", "four", "five")
ADVERBS = ("often", "today", "never-mind", "here", "again", "slowly")


def draw_clause(random: random.Random) -> Clause:
    return Clause(
        subject=_draw_phrase(random, 0.3),
        verb=random.choice(VERBS),
        object=_draw_phrase(random, 0.2),
        negated=random.random() < 0.3,
        adverb=random.choice(ADVERBS) if random.random() < 0.3 else "",
    )


def _draw_phrase(random: random.Random, relative: float) -> NounPhrase:
    number = random.choice(NUMBERS) if random.random() < 0.2 else ""
    return NounPhrase(
        noun=random.choice(NOUNS),
        plural=bool(number) or random.random() < 0.4,
        number=number,
        adjectives=tuple(random.sample(ADJECTIVES, random.choice((0, 0, 1, 1, 2)))),
        clause=(random.choice(VERBS), _draw_phrase(random, 0.0))
        if random.random() < relative
        else None,
    )


def source_of(clause: Clause) -> list[str]:
    """Tokens: "the old dog s see not two house s today"."""
    verb = [clause.verb, *(["not"] if clause.negated else [])]
    adverb = [clause.adverb] if clause.adverb else []
    return [*_source_phrase(clause.subject), *verb, *_source_phrase(clause.object), *adverb]


def _source_phrase(phrase: NounPhrase) -> list[str]:
    words = [phrase.number or "the", *phrase.adjectives, phrase.noun.word]
    if phrase.plural:
        words.append("-s")
    if phrase.clause:
        verb, object = phrase.clause
        words += ["that", verb, *_source_phrase(object)]
    return words


def target_of(clause: Clause) -> list[str]:
    """Tokens; those that begin with "-" are suffixes of the word before."""
    adverb = [_word(clause.adverb)] if clause.adverb else []
    negation = ["ne"] if clause.negated else []
    return [
        *_target_phrase(clause.subject, "nom"), *_target_object(clause.object),
        *adverb, *negation, *_target_verb(clause.verb, clause.subject, clause.object),
    ]  # fmt: skip


def _target_phrase(phrase: NounPhrase, case: str) -> list[str]:
    clause: Sequence[str] = ()
    if phrase.clause:
        verb, object = phrase.clause
        clause = [*_target_object(object), *_target_verb(verb, phrase, object), "ki"]
    agreement = "-" + phrase.noun.gender + _count(phrase)
    described = [_word(word) for word in phrase.adjectives]
    if phrase.number:
        described.append(_word(phrase.number))
    agreeing = [token for word in described for token in (word, agreement)]
    return [*clause, _word(phrase.noun.word), f"-{case}{_count(phrase)}", *agreeing]


def _target_object(phrase: NounPhrase) -> list[str]:
    return _target_phrase(phrase, "per" if phrase.noun.alive else "acc")


def _target_verb(verb: str, subject: NounPhrase, object: NounPhrase) -> list[str]:
    sense = "+" if verb in BY_LIFE and object.noun.alive else ""
    return [_word(verb + sense), f"-v{subject.noun.gender}{_count(subject)}"]


def _count(phrase: NounPhrase) -> str:
    return "pl" if phrase.plural else "sg"


_SYLLABLES = [a + b for a in "bdgklmnprtvz" for b in "aeiou"]


def _word(source: str) -> str:
    """The target's word for a source word: syllables that follow from its letters."""
    code = 0
    for letter in source:
        code = (code * 131 + ord(letter)) % 216_000
    first, rest = code % 60, code // 60
    return _SYLLABLES[first] + _SYLLABLES[rest % 60] + _SYLLABLES[rest // 60]
