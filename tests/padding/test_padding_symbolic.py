"""Padding is exact where sizes are symbols, and one graph serves all sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from exact import InFP64, assert_exact, results
from torch import Tensor, nn

from mpcompile import ir


class Scores(nn.Module):
    """Tokens are rows of the projections, and both sides of the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(5, 7), nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        return torch.softmax(scores, -1) @ x


class Images(nn.Module):
    """Any number of images of any height; their 3 channels are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 7, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(F.relu(self.first(x)))
        return out


class Sequences(nn.Module):
    """Any number of tokens in heads of 7."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(13, 3 * 2 * 7), nn.Linear(14, 13)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, 2, 7).transpose(1, 2) for y in self.qkv(x).split(14, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(b, t, 14))
        return out


SYMBOLIC: dict[str, tuple[type[nn.Module], Callable[[int, int], Tensor], tuple[int, int]]] = {
    "rows and contraction": (Scores, lambda b, t: torch.randn(b, t, 5), (0, 1)),
    "images": (Images, lambda b, t: torch.randn(b, 3, t + 5, 6), (0, 2)),
    "attention": (Sequences, lambda b, t: torch.randn(b, t, 13), (0, 1)),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("case", SYMBOLIC)
def test_symbolic_sizes_compile_once(case: str, level: str) -> None:
    build, make, dynamic = SYMBOLIC[case]
    model, found = build(), {}
    for pad in ("never", "always"):
        torch._dynamo.reset()
        backend = InFP64(pad, level)
        for b, t in ((2, 3), (5, 9), (8, 16), (3, 31), (7, 67)):
            torch.manual_seed(t * b)
            x = make(b, t)
            for dim in dynamic:
                torch._dynamo.mark_dynamic(x, dim)
            found[pad, b, t] = results(model, [x], backend, dynamic=True)
        assert len(backend.graphs) == 1, f"{pad}: {len(backend.graphs)} compilations"
    assert "constant_pad_nd" in backend.ops()
    for (pad, b, t), values in found.items():
        for name, value in values.items():
            wanted = found["never", b, t][name]
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6, msg=f"{pad}: {name}")


def test_a_symbolic_head_says_why_not() -> None:
    """The scale comes from the head size, and is a number."""

    def program(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    backend = assert_exact(program, torch.randn(2, 3, 5, 9), dynamic=True)
    (found,) = [a for n in backend.graphs[0].graph.nodes if (a := ir.alignment(n))]
    assert found.after == ("head", "value_head")
    assert "its size is a symbol" in found.reason
