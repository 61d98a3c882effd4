"""expand_attention: BF16 attention on the CPU as two products around an FP32 softmax."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, Compared, check
from torch import Tensor

from mpcompile import Policy, compiled_plans, mpcompile
from mpcompile.planner.times import LONGEST

ATTENTION = "scaled_dot_product_attention"


def qkv(*shape: int, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of (..., T, E); `keys` is another T for the last two."""
    other = shape if keys is None else (*shape[:-2], keys, shape[-1])
    query, key, value = (torch.randn(size).requires_grad_() for size in (shape, other, other))
    return query, key, value


def run(
    program: Callable[..., Tensor], *inputs: Tensor, level: str = "O1", **o: object
) -> Compared:
    return check(program, *inputs, dtype=torch.bfloat16, level=level, **o)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def is_expanded(seen: Compared) -> bool:
    products = seen.ops("LOW").count("matmul")
    kernels = [*seen.ops("LOW"), *seen.ops("FULL")].count(ATTENTION)
    assert (products, kernels) in ((2, 0), (0, 1))
    return products == 2


@LEVELS
def test_applies(level: str) -> None:
    seen = run(F.scaled_dot_product_attention, *qkv(2, 3, 16, 8), level=level)
    assert is_expanded(seen)
    assert ("softmax" if level == "O1" else "mpcompile::softmax_low") in seen.ops("FULL")


@LEVELS
def test_a_graph_without_a_backward_keeps_the_kernel(level: str) -> None:
    """Only the kernel's backward is slow."""
    attend = mpcompile(
        F.scaled_dot_product_attention, dtype=torch.bfloat16, level=level, emit="eager", strict=True
    )
    inputs = [x.detach() for x in qkv(2, 3, 16, 8)]
    with torch.no_grad():
        found = attend(*inputs)
    (plan,) = compiled_plans(attend)
    low = [node.op for node in plan.nodes if node.precision == "LOW"]
    assert f"aten::{ATTENTION}" in low
    assert "aten::matmul" not in low
    true = F.scaled_dot_product_attention(*(x.double() for x in inputs))
    torch.testing.assert_close(found.double(), true, rtol=0.02, atol=0.02)


@LEVELS
@pytest.mark.parametrize("shape", [(16, 8), (3, 5, 7), (2, 1, 9, 5), (2, 2, 2, 6, 4)])
def test_causal_in_any_shape(level: str, shape: tuple[int, ...]) -> None:
    assert is_expanded(run(causal, *qkv(*shape), level=level))


@pytest.mark.parametrize("keys", [5, 23])
def test_causal_with_another_number_of_keys(keys: int) -> None:
    assert is_expanded(run(causal, *qkv(2, 11, 8, keys=keys)))


@LEVELS
def test_additive_mask_that_learns_and_a_scale(level: str) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)

    mask = torch.randn(3, 16, 16).requires_grad_()
    assert is_expanded(run(program, *qkv(2, 3, 16, 8), mask, level=level))


@LEVELS
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_row_masked_by_minus_infinity_is_zero(level: str, kind: str) -> None:
    visible = torch.rand(16, 16) > 0.4
    visible[3] = False
    additive = torch.zeros(16, 16).masked_fill(~visible, float("-inf"))
    mask = visible if kind == "bool" else additive
    assert is_expanded(run(masked, *qkv(2, 3, 16, 8), mask, level=level))


def test_a_row_masked_by_the_lowest_number_is_uniform() -> None:
    """As in FP32. Its gradient is not compared: FP32's own kernel gets it wrong."""
    query, key, value = (x.detach() for x in qkv(16, 8))
    mask = torch.zeros(16, 16)
    mask[3] = torch.finfo(torch.float32).min
    seen = run(masked, query, key, value, mask)
    assert is_expanded(seen)
    row = seen.model(query, key, value, mask)[3]
    torch.testing.assert_close(row, value.mean(0), atol=1e-2, rtol=1e-2)


def test_dropout_zeroes_and_rescales_whole_positions() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    # Equal keys: each of 64 positions has weight 1/64, or 0, or by rescaling 1/32.
    query, key, value = torch.zeros(64, 8), torch.zeros(64, 8), torch.eye(64)
    weights = mpcompile(program, dtype=torch.bfloat16, emit="eager", strict=True)(query, key, value)
    assert set(weights.unique().tolist()) == {0.0, 1 / 32}
    assert 0.4 < (weights == 0).float().mean() < 0.6


def test_leaves_other_dtypes_alone() -> None:
    seen = check(F.scaled_dot_product_attention, *qkv(2, 3, 16, 8), dtype=torch.float16)
    assert not is_expanded(seen)


def test_leaves_long_sequences_alone() -> None:
    seen = run(F.scaled_dot_product_attention, *qkv(1, LONGEST + 1, 8))
    assert not is_expanded(seen)


def test_leaves_grouped_heads_alone() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    query = torch.randn(2, 4, 16, 8).requires_grad_()
    seen = run(program, query, *qkv(2, 2, 16, 8)[1:])
    assert not is_expanded(seen)


@pytest.mark.parametrize("word", ["full", "keep"])
def test_the_users_word_keeps_the_kernel(word: str) -> None:
    policy = Policy(**{word: [ATTENTION]})
    seen = run(F.scaled_dot_product_attention, *qkv(2, 3, 16, 8), policy=policy)
    assert "matmul" not in seen.ops("LOW")


def test_several_readers_of_one_value() -> None:
    def program(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x) + x

    assert is_expanded(run(program, qkv(2, 16, 8)[0]))


def test_inside_a_checkpoint() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attention = F.scaled_dot_product_attention
        return torch.utils.checkpoint.checkpoint(attention, q, k, v, use_reentrant=False)

    assert is_expanded(run(program, *qkv(2, 3, 16, 8)))


def test_symbolic_batch_sizes() -> None:
    inputs = qkv(6, 3, 16, 8)
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
    compiled = mpcompile(causal, dtype=torch.bfloat16, emit="aot_eager", strict=True)
    for batch in (6, 4):
        own = [x[:batch].detach().requires_grad_() for x in inputs]
        expected, actual = causal(*own), compiled(*own)
        torch.testing.assert_close(actual, expected, atol=3e-2, rtol=3e-2)


@pytest.mark.slow("compiles by Inductor, or a deep model")
@pytest.mark.parametrize("causal", [True, False])
def test_symbolic_lengths_under_dropout(causal: bool) -> None:
    """A causal mask of an unknown size stays inside the kernel; without one, any length is fine."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=0.1)

    compiled = mpcompile(program, dtype=torch.bfloat16, emit="aot_eager", strict=True)
    for length in (16, 24):
        inputs = qkv(2, 3, length, 8)
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 2)
        compiled(*inputs).sum().backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs)
    (plan,) = compiled_plans(compiled)
    kernels = sum(n.op == f"aten::{ATTENTION}" for n in plan.nodes)
    assert kernels == int(causal)


@pytest.mark.parametrize("scale", [None, 0.25])
def test_symbolic_head_sizes(scale: float | None) -> None:
    """The scale is one over the root of this size, unless it is given."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)

    compiled = mpcompile(program, dtype=torch.bfloat16, emit="aot_eager", strict=True)
    inputs = qkv(2, 3, 16, 8)
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 3)
    compiled(*inputs).sum().backward()
    (plan,) = compiled_plans(compiled)
    assert sum(n.op == f"aten::{ATTENTION}" for n in plan.nodes) == int(scale is None)
