"""A result that the low kernel lays out in another way is handed on as the FP32 program has it:
`contiguous()`, views, kernels of the user's and the caller rely on that layout.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import SETTINGS, check, fallback_reason, leaf
from graphs import ran
from module_of import module_of
from public_language import Attention
from torch import Tensor, nn

from mpcompile import Policy, ir
from mpcompile.passes.graph.place_casts import place_casts

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@DTYPES
@SETTINGS
def test_attention_of_nanogpt(level: str, emit: str, dtype: torch.dtype) -> None:
    seen = check(Attention(), torch.randn(2, 8, 32), dtype=dtype, level=level, emit=emit)
    assert seen.ops("LOW").count("linear") == 2


@pytest.mark.slow("compiles by Inductor")
def test_attention_of_symbolic_sizes_and_in_evaluation() -> None:
    model = Attention(dropout=0.1).eval()
    seen = check(model, torch.randn(2, 8, 32), dtype=torch.bfloat16, dynamic=True)
    with torch.no_grad():
        seen.model(torch.randn(3, 9, 32))
    seen.model.train()(torch.randn(3, 11, 32)).sum().backward()
    assert len(seen.plans) > 1
    assert [plan.left for plan in seen.plans] == [None] * len(seen.plans)


def heads(x: Tensor, w: Tensor) -> Tensor:
    q = F.linear(x, w).view(2, 5, 3, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q)


@torch.library.custom_op("layouts::by_rows", mutates_args=())
def by_rows(x: Tensor) -> Tensor:
    """A kernel that counts on dense rows."""
    assert x.is_contiguous()
    return x * 2


by_rows.register_fake(torch.empty_like)
by_rows.register_autograd(lambda ctx, gradient: gradient * 2)


def asked_whether_contiguous(x: Tensor, w: Tensor) -> Tensor:
    y = heads(x, w).transpose(1, 2)
    return (y if y.is_contiguous() else y.clone()).view(10, 12)


def masked_by_a_parameter(x: Tensor, w: Tensor) -> Tensor:
    q = F.linear(x, w).view(2, 5, 3, 4).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, q, q, attn_mask=w[:5, :5])
    return y.contiguous().view(6, 20)


def slice_named_by_places(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)[:, :, :5].as_strided((2, 3), (5, 1), 1)


def einsum_viewed(x: Tensor, w: Tensor) -> Tensor:
    q = F.linear(x, w).view(2, 5, 3, 4)
    return torch.einsum("bthd,bshd->bhts", q, q).transpose(1, 2).contiguous().view(-1)


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "given_to_a_kernel": lambda x, w: by_rows(heads(x, w).transpose(1, 2).contiguous()),
    "viewed_without_contiguous": lambda x, w: heads(x, w).transpose(1, 2).view(2, 5, 12),
    "asked_whether_contiguous": asked_whether_contiguous,
    "named_by_places": lambda x, w: heads(x, w).as_strided((2, 60), (60, 1), 0),
    "returned": heads,
    "masked_by_a_parameter": masked_by_a_parameter,
    "slice_named_by_places": slice_named_by_places,
    "beyond_a_slice": lambda x, w: F.linear(x, w)[:1, :, 3:].as_strided((10, 4), (12, 1), 7),
    "transposed_named_by_places": lambda x, w: F.linear(
        F.linear(x, w).transpose(1, 2).as_strided((3, 12), (12, 1), 12), w
    ),
    "einsum_viewed": einsum_viewed,
}


@DTYPES
@SETTINGS
@pytest.mark.parametrize("case", PROGRAMS)
def test_programs_that_rely_on_a_layout(
    case: str, level: str, emit: str, dtype: torch.dtype
) -> None:
    program, x, w = PROGRAMS[case], leaf(2, 5, 12), leaf(12, 12)
    seen = check(program, x, w, dtype=dtype, level=level, emit=emit)
    assert seen.model(x, w).stride() == program(x, w).stride()
    assert "linear" in seen.ops("LOW")


@DTYPES
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=str)
def test_convolutions_viewed(dtype: torch.dtype, memory: torch.memory_format) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.slim(m.wide(x).tanh())
        return (y if y.is_contiguous() else y.permute(0, 2, 3, 1)).view(2, -1)

    def net() -> nn.Module:
        return module_of(forward, wide=nn.Conv2d(3, 8, 3), slim=nn.Conv2d(8, 4, 1))

    x = torch.randn(2, 3, 6, 6)
    for emit in ("eager", "aot_eager"):
        check(net().to(memory_format=memory), x.to(memory_format=memory), dtype=dtype, emit=emit)


def test_only_what_lies_otherwise_is_copied() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        h = F.linear(x, w).transpose(0, 1).relu()
        return h[:3].expand(2, 3, 4).softmax(-1) + h[:, 1:].sum()

    stage = ran(place_casts, program, leaf(4, 4), leaf(4, 4))
    assert not [node for node in stage.gm.graph.nodes if ir.role(node) is ir.Role.LAYOUT]


def test_a_policy_that_moves_what_is_named_by_places() -> None:
    """Policy is never overruled: the graph can't be as it asks, and says so."""
    policy = Policy(low=["aten::slice"])
    reason = fallback_reason(slice_named_by_places, leaf(2, 5, 12), leaf(12, 12), policy=policy)
    assert "as_strided reads slice_1_f32 by places in memory, where it lies otherwise" in reason
