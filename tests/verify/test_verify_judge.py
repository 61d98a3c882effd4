"""By rounding, not by a constant: what is right, and what is wrong."""

import pytest
import torch

from mpcompile.verify.judge import errors_of, is_vacuous
from mpcompile.verify.reference import Pair

BF16_EPS = 2.0**-7


def pair_of(wide: torch.Tensor, eps: float = BF16_EPS) -> Pair:
    """A value of three roundings, and the exact one."""
    low = wide
    for _ in range(3):
        low = (low * 3).bfloat16().float() / 3
    return Pair(low.bfloat16(), wide, eps)


@pytest.fixture
def wide() -> torch.Tensor:
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(0))


def test_what_is_rounded_less_often_is_right(wide: torch.Tensor) -> None:
    errors = errors_of(wide.bfloat16(), pair_of(wide))
    assert errors.right
    assert errors.ratio <= 1


def test_a_wrong_tile_is_seen(wide: torch.Tensor) -> None:
    wrong = wide.bfloat16()
    wrong[32:36, 64:96] = wrong[32:36, 64:96].flip(1)
    assert not errors_of(wrong, pair_of(wide)).right


@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_a_wrong_row_of_another_size_is_seen(wide: torch.Tensor, scale: float) -> None:
    wide = torch.cat([wide, wide[:1] * scale])
    wrong = wide.bfloat16()
    wrong[-1] = wrong[-1].flip(0)
    assert not errors_of(wrong, pair_of(wide)).right


def test_one_wrong_element_in_a_large_value_is_seen_in_its_row() -> None:
    wide = torch.randn(4096, 1024, generator=torch.Generator().manual_seed(0))
    wrong = wide.bfloat16()
    wrong[32:64] = wrong[32:64].flip(1)
    assert not errors_of(wrong, pair_of(wide)).right


def test_not_finite_is_wrong_at_once(wide: torch.Tensor) -> None:
    wrong = wide.bfloat16()
    wrong[3, 5] = torch.nan
    errors = errors_of(wrong, pair_of(wide))
    assert not errors.finite
    assert not errors.right


@pytest.mark.parametrize("exact", [1.0, 1e5], ids=["in part", "by its size"])
def test_where_fp16_overflows_uncompiled_it_may_in_other_places(
    wide: torch.Tensor, exact: float
) -> None:
    """The order of a sum decides in which: of a bilinear layer's gradients 9 and 6 were."""
    wide[3, :4] = exact
    low, compiled = wide.half(), wide.half()
    low[3, :4] = compiled[5, :6] = torch.inf
    assert errors_of(compiled, Pair(low, wide, BF16_EPS)).right
    compiled[7:9] = torch.nan
    assert not errors_of(compiled, Pair(low, wide, BF16_EPS)).right


def test_what_a_mask_makes_infinite_is_no_overflow(wide: torch.Tensor) -> None:
    wide[3, :64] = -torch.inf
    compiled = wide.half()
    compiled[5, :6] = torch.nan
    assert not errors_of(compiled, Pair(wide.half(), wide, BF16_EPS)).right


def test_overflow_that_the_uncompiled_value_has_too_is_not_wrong() -> None:
    wide = torch.tensor([1.0, 1e5, -1e5, 3.0])
    low = wide.half()
    assert errors_of(low.clone(), Pair(low, wide, 2.0**-10)).right
    assert errors_of(torch.tensor([1.0, torch.nan, -torch.inf, 3.0]).half(),
                     Pair(low, wide, 2.0**-10)).right  # fmt: skip


def test_an_overflow_that_the_compiled_value_avoids_is_not_wrong() -> None:
    wide = torch.tensor([1.0, 200.0])
    low = torch.tensor([1.0, torch.inf]).half()
    assert errors_of(wide.half(), Pair(low, wide, 2.0**-10)).right


def test_where_only_the_uncompiled_value_overflows_nothing_is_told() -> None:
    wide, low = torch.tensor([1.0, 200.0]), torch.tensor([1.0, torch.nan]).half()
    assert errors_of(torch.tensor([1.0, 7.0]).half(), Pair(low, wide, 2.0**-10)).right
    assert not errors_of(torch.tensor([2.0, 200.0]).half(), Pair(low, wide, 2.0**-10)).right
    nothing = errors_of(wide.half(), Pair(low / 0 * 0, wide, 2.0**-10))
    assert nothing.compiled == ()
    assert not (errors_of((wide + 1).half(), Pair(wide.half(), wide, 2.0**-10)) | nothing).right


def test_indices_are_exact_where_nothing_is_rounded() -> None:
    index = torch.arange(4096).reshape(64, 64)
    wrong = index.clone()
    wrong[3, 5] += 1
    assert errors_of(index, Pair(index, index, 0.0)).right
    assert not errors_of(wrong, Pair(index, index, 0.0)).right


def test_decisions_may_be_others_where_rounding_decides() -> None:
    exact = torch.zeros(64, 64, dtype=torch.bool)
    low = exact.clone()
    low[0, :10] = True
    mine = exact.clone()
    mine[1, :20] = True
    assert errors_of(mine, Pair(low, exact, BF16_EPS)).right
    assert not errors_of(~exact, Pair(low, exact, BF16_EPS)).right


def test_a_sum_in_another_order_is_right_in_fp32() -> None:
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    backward = x.flip(1).cumsum(1)[:, -1]
    exact = x.double().sum(1)
    low = x.sum(1)
    assert errors_of(backward, Pair(low, exact, 2.0**-23)).right
    assert not errors_of(low + 1e-2, Pair(low, exact, 2.0**-23)).right


def test_what_proves_nothing() -> None:
    assert is_vacuous(torch.zeros(3))
    assert is_vacuous(torch.ones(2, 2))
    assert is_vacuous(torch.tensor(0.0))
    assert not is_vacuous(torch.tensor(1.0))
    assert not is_vacuous(torch.tensor([1.0, 2.0]))
    assert not is_vacuous(torch.ones(0))


def test_a_conjugate_view_is_compared(wide: torch.Tensor) -> None:
    exact = torch.view_as_complex(wide.view(64, 64, 2)).conj()
    assert errors_of(exact.clone(), Pair(exact, exact, BF16_EPS)).right
    assert not errors_of(exact.conj(), Pair(exact, exact, BF16_EPS)).right
