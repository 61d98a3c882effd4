"""Padding is exact where sizes are symbols, and one graph serves all sizes; under Inductor, too,
which then has nothing left to pad.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exact import InFP64, assert_exact, results
from module_of import module_of
from torch import Tensor, fx, nn
from torch._inductor.fx_passes.pad_mm import get_padded_length

from mpcompile import compiled_plans, ir, mpcompile
from mpcompile.ir import aten


def scores() -> Any:
    """Tokens are rows of the projections, and both sides of the scores."""
    return module_of(
        lambda m, x: torch.softmax(m.q(x) @ m.k(x).transpose(1, 2), -1) @ x,
        q=nn.Linear(5, 7), k=nn.Linear(5, 7),
    )  # fmt: skip


def images() -> nn.Module:
    """Any number of images of any height; their 3 channels are padded."""
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 7, 3))


def sequences() -> Any:
    """Any number of tokens in heads of 7."""

    def forward(m: Any, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, 2, 7).transpose(1, 2) for y in m.qkv(x).split(14, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return m.out(y.transpose(1, 2).reshape(b, t, 14))

    return module_of(forward, qkv=nn.Linear(13, 3 * 2 * 7), out=nn.Linear(14, 13))


SYMBOLIC: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], tuple[int, int]]] = {
    "rows and contraction": (scores, lambda b, t: torch.randn(b, t, 5), (0, 1)),
    "images": (images, lambda b, t: torch.randn(b, 3, t + 5, 6), (0, 2)),
    "attention": (sequences, lambda b, t: torch.randn(b, t, 13), (0, 1)),
}


@pytest.mark.slow("compiles padded models, of many sizes")
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


# -- under Inductor --------------------------------------------------------------------------------


PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def block() -> Any:
    """Attention by products and a softmax, then two projections around a gelu; every size odd."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = torch.softmax(m.query(x) @ m.key(x).transpose(1, 2), -1) @ x
        return m.down(F.gelu(m.up(x)))

    sides = {"query": nn.Linear(13, 11), "key": nn.Linear(13, 11, bias=False)}
    return module_of(forward, **sides, up=nn.Linear(13, 37), down=nn.Linear(37, 5))


@pytest.mark.slow("compiles padded models, of many sizes")
def test_symbolic_sizes_compile_once_and_no_dim_is_left_unaligned() -> None:
    """Once more where no lane is needed: a slice is contiguous then, on which torch guards."""
    seen: dict[str, bool] = {}

    def look(graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.target in PRODUCTS:
                sizes = [x for n in node.all_input_nodes[-2:] for x in ir.shape(n)[-2:]]
                assert all(get_padded_length(x, 8) == 0 for x in sizes)
                seen[node.name] = all(ir.known_multiple(x, 8) for x in sizes)

    model, reference = block(), block()
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
            assert (p.grad - q.grad).norm() < 6e-2 * q.grad.norm() + 1e-5
        torch.testing.assert_close(fast(x), reference(x), rtol=3e-2, atol=3e-2)
        assert len(compiled_plans(fast)) == (1 if length % 8 else 2)
    assert len(seen) == 6 + 6 + 3  # forward, weights, and what is no input of the model
    assert all(seen.values()), seen
