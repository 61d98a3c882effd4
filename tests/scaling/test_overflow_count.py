"""`Count`: how many backward passes overflowed between two moments."""

import pytest
import torch

from mpcompile.scaling.overflows import _FLAGS, Count, Overflows


def counts(flags: list[int]) -> list[Count]:
    """The count before any pass, and after each."""
    found = [Count()]
    for flag in flags:
        found.append(found[-1].one_more(torch.tensor(flag)))
    return found


@pytest.mark.parametrize("length", [1, 3, _FLAGS, _FLAGS + 1, 3 * _FLAGS + 2])
def test_between_any_two_moments(length: int) -> None:
    flags = [int(i % 5 in (1, 2)) for i in range(length)]
    found = counts(flags)
    for start in range(0, length, 1 + length // 20):
        for end in range(start + 1, length + 1):
            new = found[end].since(found[start])
            assert int(new) == sum(flags[start:end])
            assert new.dtype is torch.int64


def test_where_no_backward_ran() -> None:
    before, after = counts([1])
    assert before.since(before) is after.since(after) is None


def test_it_keeps_few_flags_however_many_passes_there_were() -> None:
    last = counts([1] * (5 * _FLAGS))[-1]
    assert len(last.flags) <= _FLAGS
    assert last.passes == 5 * _FLAGS


def test_a_flag_is_copied_when_it_is_counted() -> None:
    """The memory of a CUDA graph's result is written to by its next run."""
    overflows = Overflows()
    leaf = overflows.leaf(torch.device("cpu"))
    leaf.grad = flag = torch.ones(())
    count = overflows.count()
    flag.zero_()
    assert leaf.grad is None
    assert int(count.since(Count()) or 0) == 1
