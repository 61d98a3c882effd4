"""A private name of torch's that is gone: the import works, it is named, and a training is
right or refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from gone_names import Seen
from repository import ROOT, SUPPORT

from mpcompile.torch_inside.private_names import NAMES, take_all

pytestmark = pytest.mark.inside

take_all()
REFUSED = ("MPCompileError", "MissingInTorch")
Ask = Callable[[str], Seen]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    with subprocess.Popen(
        [sys.executable, str(SUPPORT / "gone_names.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    ) as server:  # fmt: skip
        given, answers = server.stdin, server.stdout

        def asked(path: str) -> Seen:
            given.write(f"{path}\n")
            given.flush()
            return Seen(**json.loads(answers.readline()))

        yield asked
        given.close()


@pytest.mark.slow("processes that lack names of torch")
@pytest.mark.sampled(20)
@pytest.mark.parametrize("path", NAMES)
def test_a_name_that_is_gone_is_named_and_nothing_is_silently_wrong(path: str, ask: Ask) -> None:
    seen = ask(path)
    assert seen.error is None, seen.error
    if seen.how == "kept":
        pytest.skip("it can't be taken away")
    named = any(path.replace(":", ".") in text for text in seen.found)
    assert named or NAMES[path].others or not NAMES[path].taken, (seen.how, seen.found)
    for program, wrong in seen.steps.items():
        refused = wrong is None or any(error in wrong for error in REFUSED)
        assert refused, f"{seen.how}, {program}: {wrong}"
