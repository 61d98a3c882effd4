"""Padding under Inductor: compiled for all sizes at once, and nothing left for Inductor to pad."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor.fx_passes.pad_mm import get_padded_length

from mpcompile import compiled_plans, ir, mpcompile
from mpcompile.ir import aten

PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


class Block(nn.Module):
    """Attention by products and a softmax, then two projections around a gelu; every size odd."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(13, 11), nn.Linear(13, 11, bias=False)
        self.up, self.down = nn.Linear(13, 37), nn.Linear(37, 5)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        x = torch.softmax(scores, -1) @ x
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


def test_symbolic_sizes_compile_once_and_no_dim_is_left_unaligned() -> None:
    """Once more where no lane is needed: a slice is contiguous then, on which torch guards."""
    seen: dict[str, bool] = {}

    def look(graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.target in PRODUCTS:
                sizes = [x for n in node.all_input_nodes[-2:] for x in ir.shape(n)[-2:]]
                assert all(get_padded_length(x, 8) == 0 for x in sizes)
                seen[node.name] = all(ir.known_multiple(x, 8) for x in sizes)

    model, reference = Block(), Block()
    reference.load_state_dict(model.state_dict())
    fast = mpcompile(
        model, dtype=torch.bfloat16, pad="always", strict=True, dynamic=True,
        options={"joint_custom_post_pass": look},
    )  # fmt: skip
    for batch, length in ((3, 9), (5, 31), (7, 67), (2, 16), (4, 24)):
        x = torch.randn(batch, length, 13)
        for net in (fast, reference):
            net.zero_grad()
            net(x).square().mean().backward()
        for p, q in zip(fast.parameters(), reference.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert (p.grad - q.grad).norm() < 6e-2 * q.grad.norm() + 1e-5
        torch.testing.assert_close(fast(x), reference(x), rtol=3e-2, atol=3e-2)
        assert len(compiled_plans(fast)) == (1 if length % 8 else 2)
    assert len(seen) == 6 + 6 + 3  # forward, weights, and what is no input of the model
    assert all(seen.values()), seen
