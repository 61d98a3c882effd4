"""Attention masks: masked stays masked, and a row masked as a whole stays finite."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, check, leaf


def mask_with_a_full_row() -> torch.Tensor:
    """True where attention is allowed; nobody may look anywhere from row 2."""
    mask = torch.ones(8, 8).tril().bool()
    mask[2] = False
    return mask


def masked_fill_with_the_minimum(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ k


def masked_fill_in_place(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2)
    scores.masked_fill_(~mask, -1e9)
    return scores.softmax(-1) @ k


def added_mask(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As Hugging Face's models write it: a float mask, cast to the scores' dtype."""
    scores = q @ k.transpose(-1, -2) / 4
    bias = (1.0 - mask.to(scores.dtype)) * torch.finfo(scores.dtype).min
    weights = F.softmax(scores + bias, dim=-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(weights, 0.0) @ k


def where_mask(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2)
    smallest = torch.tensor(-1e30)
    return torch.where(mask, scores, smallest).softmax(-1) @ k


def baddbmm_mask(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    bias = torch.where(mask, 0.0, torch.finfo(q.dtype).min).expand(2, 8, 8)
    return torch.baddbmm(bias, q, k.transpose(-1, -2), alpha=0.25).softmax(-1) @ k


def sdpa_float_mask(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    bias = torch.where(mask, 0.0, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, k, attn_mask=bias)


def sdpa_minus_billion(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -1e9)
    return F.scaled_dot_product_attention(q, k, k, attn_mask=bias)


def sdpa_bool_mask(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)


MASKS = [
    masked_fill_with_the_minimum, masked_fill_in_place, added_mask, where_mask, baddbmm_mask,
    sdpa_float_mask, sdpa_minus_billion, sdpa_bool_mask,
]  # fmt: skip


@LEVELS
@pytest.mark.parametrize("program", MASKS)
def test_masks(program: Any, level: str) -> None:
    """The row masked as a whole is finite, as in FP32; what it holds means nothing to anybody."""

    def rows(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> Any:
        out = program(q, k, mask)
        return out.masked_fill(~mask.any(-1, keepdim=True), 0.0), out.isfinite().all()

    check(rows, leaf(2, 8, 16), leaf(2, 8, 16), mask_with_a_full_row(), level=level)


@LEVELS
@pytest.mark.parametrize("floor", [-1e9, torch.finfo(torch.float32).min, float("-inf")])
def test_float_mask_that_comes_from_outside(floor: float, level: str) -> None:
    """Masked keys stay masked: what they hold must not reach the output."""
    mask = torch.ones(8, 8).tril().bool()
    bias = torch.zeros(8, 8).masked_fill(~mask, floor)
    result = check(
        F.scaled_dot_product_attention, leaf(2, 8, 16), leaf(2, 8, 16), leaf(2, 8, 16), bias,
        level=level, low=["scaled_dot_product_attention"],
    )  # fmt: skip
    q, k = torch.randn(2, 8, 16), torch.randn(2, 8, 16)
    other = k.clone()
    other[:, -1] = 100.0  # only the last row may look there
    a, b = (result.model(q, keys, keys, bias) for keys in (k, other))
    assert torch.equal(a[:, :-1], b[:, :-1])


@LEVELS
def test_additive_mask_from_outside_on_scores(level: str) -> None:
    def program(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-1, -2) + bias).softmax(-1) @ k

    bias = torch.zeros(8, 8).masked_fill(~mask_with_a_full_row(), torch.finfo(torch.float32).min)
    check(program, leaf(2, 8, 16), leaf(2, 8, 16), bias, level=level, low=["matmul"])


@LEVELS
def test_causal_attention(level: str) -> None:
    def program(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    check(
        program, leaf(2, 8, 16), leaf(2, 8, 16), level=level, low=["scaled_dot_product_attention"]
    )
