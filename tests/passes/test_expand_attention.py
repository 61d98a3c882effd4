"""expand_attention: BF16 attention on the CPU as two products around an FP32 softmax."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import EMITS, LEVELS, Compared, check
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


def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attention = F.scaled_dot_product_attention
    return torch.utils.checkpoint.checkpoint(attention, q, k, v, use_reentrant=False)


EXPANDED: dict[str, tuple[Callable[..., Tensor], Callable[[], Sequence[Tensor]]]] = {
    "causal, with fewer keys": (causal, lambda: qkv(2, 11, 8, keys=5)),
    "causal, with more keys": (causal, lambda: qkv(2, 11, 8, keys=23)),
    "an additive mask that learns, and a scale": (
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3),
        lambda: (*qkv(2, 3, 16, 8), torch.randn(3, 16, 16).requires_grad_()),
    ),
    "several readers of one value": (
        lambda x: F.scaled_dot_product_attention(x, x, x) + x, lambda: qkv(2, 16, 8)[:1]
    ),
    "inside a checkpoint": (checkpointed, lambda: qkv(2, 3, 16, 8)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "level"),
    [*((case, "O1") for case in EXPANDED), ("an additive mask that learns, and a scale", "O2")],
)
def test_what_is_expanded(case: str, level: str) -> None:
    program, inputs = EXPANDED[case]
    assert is_expanded(run(program, *inputs(), level=level))


@LEVELS
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_row_masked_by_minus_infinity_is_zero(level: str, kind: str) -> None:
    visible = torch.rand(16, 16) > 0.4
    visible[3] = False
    additive = torch.zeros(16, 16).masked_fill(~visible, float("-inf"))
    mask = visible if kind == "bool" else additive
    assert is_expanded(run(masked, *qkv(2, 3, 16, 8), mask, level=level))


@LEVELS
@EMITS
@pytest.mark.parametrize(("heads", "kept"), [(4, 1), (3, 0)])
def test_attentions_share_a_mask_in_memory(level: str, emit: str, heads: int, kept: int) -> None:
    """Of every head's, causal ones, one inside a checkpoint, and one that is written between."""

    def program(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        own, other = visible & True, visible.clone()
        q = masked(masked(masked(q, k, v, own), k, v, own), k, v, other)
        other[:, 1:9] = False  # another mask then
        q = masked(q, k, v, other)
        q = torch.utils.checkpoint.checkpoint(masked, q, k, v, own, use_reentrant=False)
        return causal(causal(q, k, v), k, v)

    seen = run(program, *qkv(1, heads, 16, 8), torch.rand(16, 16) > 0.4, level=level, emit=emit)
    assert [*seen.ops("FULL")].count("mpcompile::kept") == 5 * kept


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


def test_what_is_left() -> None:
    """In FP16; of long sequences; with heads in groups."""
    attention = F.scaled_dot_product_attention
    assert not is_expanded(check(attention, *qkv(2, 3, 16, 8), dtype=torch.float16))
    assert not is_expanded(run(attention, *qkv(1, LONGEST + 1, 8)))
    (query, *_), (_, key, value) = qkv(2, 4, 16, 8), qkv(2, 2, 16, 8)
    grouped = lambda q, k, v: attention(q, k, v, enable_gqa=True)  # noqa: E731
    assert not is_expanded(run(grouped, query, key, value))


@pytest.mark.parametrize("word", ["full", "keep"])
def test_the_users_word_keeps_the_kernel(word: str) -> None:
    policy = Policy(**{word: [ATTENTION]})
    seen = run(F.scaled_dot_product_attention, *qkv(2, 3, 16, 8), policy=policy)
    assert "matmul" not in seen.ops("LOW")


def test_symbolic_batch_sizes() -> None:
    inputs = qkv(6, 3, 16, 8)
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
    compiled = mpcompile(causal, dtype=torch.bfloat16, emit="aot_eager", strict=True)
    for batch in (6, 4):
        own = [x[:batch].detach().requires_grad_() for x in inputs]
        expected, actual = causal(*own), compiled(*own)
        torch.testing.assert_close(actual, expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(
    ("dim", "sizes", "more", "kernels"),
    [
        # A causal mask of an unknown size stays inside of the kernel.
        pytest.param(2, (16, 24), {"is_causal": True, "dropout_p": 0.1}, 1,
                     marks=pytest.mark.slow("compiles by Inductor, or a deep model")),
        pytest.param(2, (16, 24), {"dropout_p": 0.1}, 0,
                     marks=pytest.mark.slow("compiles by Inductor, or a deep model")),
        # The scale is one over the root of this size, unless it is given.
        (3, (8,), {}, 1),
        (3, (8,), {"scale": 0.25}, 0),
    ],
)  # fmt: skip
def test_symbolic_lengths_and_head_sizes(
    dim: int, sizes: tuple[int, ...], more: dict[str, Any], kernels: int
) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **more)

    compiled = mpcompile(program, dtype=torch.bfloat16, emit="aot_eager", strict=True)
    for size in sizes:
        inputs = qkv(*(2, 3, 16, 8)[:dim], size, *(2, 3, 16, 8)[dim + 1 :])
        for x in inputs:
            torch._dynamo.mark_dynamic(x, dim)
        compiled(*inputs).sum().backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs)
    (plan,) = compiled_plans(compiled)
    assert sum(n.op == f"aten::{ATTENTION}" for n in plan.nodes) == kernels
