"""The planted defects of `tests/support/mutants.py` fit the sources; a run of them is no test."""

import pytest
from mutants import MUTANTS, Mutant
from repository import ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_can_be_planted(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    for path in mutant.caught_by:
        file, _, test = path.partition("::")
        assert f"def {test}" in (ROOT / file).read_text()


def test_there_are_twenty_with_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20
