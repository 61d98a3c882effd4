"""Torch's operators on large operands and random programs, compiled, verified and judged again.

What verification says of each is compared with the truth (`verified_runs.py`): code that it calls
wrong is wrong, and none further off than three times eager's rounding gets past it.

    pytest -m sweep tests/verify/test_verify_sweep.py -n 2        (about 2.5 hours on 2 cores)

`make sweep` writes what was cured into tests/verify/cured.md (`verified_page.py`), which fails
where more than 2% of the cases end uncompiled.
"""

import json
from collections.abc import Callable

import large_operators
import large_programs
import pytest
import torch
from torch.utils import _pytree as pytree
from verified_runs import How, Subject, examine, ratio

PROGRAMS = 300
DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16}
NAMES = list(large_operators.names())

# What torch.compile by itself can't compile either, or what eager refuses, is no fault of ours.
EXCUSED = ("torch.compile, too: ", "eager: ")


def check(subject: Subject, number: int, dtype: str, record: Callable[[str, object], None]) -> None:
    """One subject at one of the levels."""
    outcome = examine(subject, How(DTYPES[dtype], ("O1", "O2")[number % 2]))
    record("verified", json.dumps(outcome.data()))
    assert not outcome.failed or outcome.failed.startswith(EXCUSED), outcome.failed
    assert not outcome.wrong, f"missed: {outcome}\n{subject.text}"
    assert not outcome.is_false_alarm, f"false alarm: {outcome}\n{subject.text}"


@pytest.mark.usefixtures("own_inductor_cache")
@pytest.mark.sweep("all of torch's operator table")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_operators(name: str, dtype: str, record_property: Callable[[str, object], None]) -> None:
    try:
        subject = large_operators.subject_of(name)
    except LookupError:
        pytest.skip("the operator takes none of its samples here")
    check(subject, NAMES.index(name), dtype, record_property)


@pytest.mark.usefixtures("own_inductor_cache")
@pytest.mark.sweep("random programs")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", range(PROGRAMS))
def test_programs(number: int, dtype: str, record_property: Callable[[str, object], None]) -> None:
    check(large_programs.subject_of(number), number, dtype, record_property)


# -- the sweep looks at something -----------------------------------------------------------------


def test_most_operands_are_large() -> None:
    """Of every 16th operator that takes tensors of one dim or more."""
    found = []
    for name in NAMES[::16]:
        try:
            arguments = large_operators.subject_of(name).draw(0)
        except LookupError:
            continue
        tensors = [v for v in pytree.tree_leaves(arguments) if isinstance(v, torch.Tensor)]
        if any(v.dim() for v in tensors):
            found.append(max(v.numel() for v in tensors) >= 64 * 128)
    assert len(found) > 30
    assert sum(found) >= 0.8 * len(found)


def test_a_number_is_a_program() -> None:
    texts = [large_programs.subject_of(number).text for number in range(20)]
    assert texts == [large_programs.subject_of(number).text for number in range(20)]
    assert len({*texts}) == 20


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_judge(dtype: torch.dtype) -> None:
    """A rounding is right, and so is none at all; a tile of other numbers, or one NaN, isn't."""
    exact = torch.randn(64, 128, dtype=torch.float64)
    eager = [(exact.to(dtype) * 1.01).to(dtype)]
    assert ratio(eager[0], exact, eager, dtype) <= 1
    assert ratio(exact.to(dtype), exact, eager, dtype) < 1
    tile, hole, doubled = (exact.to(dtype) for _ in range(3))
    tile[:32, :32] = exact.to(dtype)[32:, 32:64]
    hole[3, 5] = torch.nan
    doubled[:, 7] *= 1.2
    assert all(ratio(wrong, exact, eager, dtype) > 3 for wrong in (tile, hole, doubled))
