"""Random programs through the compiler, against FP64.

A few of them here; five thousand with

    pytest -m sweep tests/hazards/test_fuzz.py -n 2        (about 20 minutes on 2 cores)

The programs: fuzz_lines.py. What is demanded of them: fuzz_judge.py.
"""

import functools
import random
import re
from collections import Counter
from typing import Any

import fuzz_judge
import pytest
from fuzz_judge import Setting, Wrong, judge
from fuzz_lines import from_seed
from fuzz_programs import Program
from fuzz_runs import Discarded

from mpcompile.ir import spec, units
from mpcompile.passes.graph import scale_gradients

pytestmark = pytest.mark.slow("random programs")

LEVELS, EMITS = ("O1", "O2"), ("eager", "aot_eager")
SCALES: tuple[float | str, ...] = (1024.0, 1024.0, 1024.0, "dynamic")
SECONDS = (None, None, None, None, None, 6)  # the batch of a second call

# Of the programs that are no one else's fault: left in FP32, or drowned in rounding errors.
MOST_FALLBACKS, MOST_BLUNT = 0.15, 0.1


def setting_of(seed: int, emits: tuple[str, ...] = EMITS) -> Setting:
    """The setting of a number."""
    choice = random.Random(seed).choice
    return Setting(choice(LEVELS), choice(emits), choice(SCALES), choice(SECONDS))


class Tally:
    """What came of many programs."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.judged = self.blunt = 0

    def count(self, program: Program, setting: Setting) -> None:
        try:
            verdict = judge(program, setting)
        except Discarded as reason:
            self.outcomes["discarded"] += 1
            self.reasons[f"discarded: {reason}"] += 1
            return
        except Wrong as error:
            raise AssertionError(f"{error}\n{setting}\n{program}") from None
        self.outcomes["fallback" if verdict.fallbacks else "judged"] += 1
        self.judged += verdict.judged
        self.blunt += verdict.blunt
        for text in verdict.fallbacks:
            why = text.partition("FP32: ")[2].partition(". It is compiled")[0]
            self.reasons[re.sub(r"\b[a-z]+\w*\d\w*\b", "N", why)] += 1

    def check(self) -> None:
        print(f"\n{dict(self.outcomes)}; {self.blunt} of {self.judged} values are blunt")
        for reason, count in self.reasons.most_common():
            print(f"{count:5} {reason}")
        kept = self.outcomes["judged"] + self.outcomes["fallback"]
        assert kept > self.outcomes["discarded"], self.reasons
        most = MOST_FALLBACKS * kept
        assert self.outcomes["fallback"] <= most + 2 * most**0.5, self.reasons  # chance of a few
        assert self.blunt <= MOST_BLUNT * self.judged


def run(numbers: range, emits: tuple[str, ...] = EMITS) -> None:
    """The programs of some numbers, each independent of the others, as the shares demand."""
    tally = Tally()
    for number in numbers:
        tally.count(from_seed(number), setting_of(number, emits))
    tally.check()


@pytest.mark.parametrize("emit", EMITS)
def test_random_programs(emit: str) -> None:
    run(range(16), (emit,))


@pytest.mark.sweep("random programs")
@pytest.mark.parametrize("number", range(50))
def test_many_random_programs(number: int) -> None:
    run(range(100 * number, 100 * number + 100))


@pytest.mark.sweep("random programs")
def test_random_programs_under_inductor() -> None:
    run(range(20), ("inductor",))


# -- the judge has teeth --------------------------------------------------------------------------


@functools.cache
def differentiable(count: int) -> list[Program]:
    """Programs that are right, return something differentiable and run without a fallback; they
    write no input, through which gradients would come past the faults planted on results.
    """
    found: list[Program] = []
    number = 0
    while len(found) < count:
        number += 1
        program = from_seed(number)
        try:
            wanted = fuzz_judge.reference(program, 0)
            gradients = [v for n, v in wanted.exact.values.items() if n.startswith("gradient")]
            if any(item.kind in ("buffer", "inner") for item in program.inputs):
                continue
            large = any(g is not None and g.norm() > 1e-3 for g in gradients)
            if large and not fuzz_judge.attempt(program, Setting()).fallbacks:
                found.append(program)
        except (Discarded, Wrong):
            pass
    return found


def caught(programs: list[Program]) -> list[str]:
    """What the judge says to each."""
    found = []
    for program in programs:
        try:
            fuzz_judge.attempt(program, Setting())
        except Wrong as error:
            found.append(str(error))
    return found


def test_a_forgotten_scale_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first result is not scaled: its gradients come out 1024 times too small."""
    programs = differentiable(5)
    original = scale_gradients._Scaler.scale_outputs

    def forgetful(self: Any) -> None:
        before = list(self.graph.output_node().args[0])
        original(self)
        after = list(self.graph.output_node().args[0])
        for k, (old, new) in enumerate(zip(before, after, strict=True)):
            if old is not new:
                after[k] = old
                break
        self.graph.output_node().args = (tuple(after),)

    monkeypatch.setattr(scale_gradients._Scaler, "scale_outputs", forgetful)
    others = tuple(promise for promise in spec.PROMISES if promise.check is not units.complaints)
    monkeypatch.setattr(spec, "PROMISES", others)  # or no such graph is emitted
    messages = caught(programs)
    assert len(messages) >= 4
    assert any(message.startswith("gradient of") for message in messages)
