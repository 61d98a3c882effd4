"""Calls that stay as they are, with low work around: cond, flex_attention, scan, RNNs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, SETTINGS, assert_near, check, leaf
from module_of import module_of
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from versions import since

from mpcompile import Policy, compiled_plans, mpcompile


@pytest.mark.slow("a matrix of trainings against FP64")
@SETTINGS
def test_cond(level: str, emit: str) -> None:
    """Its branches are captured in FP32; what stands around it is low."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w)
        h = torch.cond(h.detach().sum() > 0, lambda a: torch.sin(a @ w), lambda a: a * 2 + 1, (h,))
        return F.linear(h, w)

    for sign in (1, -1):
        w = (torch.ones(16, 16) * sign / 8 + torch.randn(16, 16) / 50).requires_grad_()
        x = torch.rand(8, 16).requires_grad_()
        torch._dynamo.reset()
        check(program, x, w, level=level, emit=emit, low=["linear"])


@LEVELS
def test_cond_takes_either_branch_of_one_compilation(level: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w)
        return torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a - 1, (h,))

    fast = mpcompile(program, dtype=torch.float16, level=level, emit="eager", strict=True)
    w = torch.randn(4, 16)
    for x in (torch.rand(8, 16), -torch.rand(8, 16)):
        assert_near(fast(x, w), program(x, w), "output", 1e-2)


def relative(score: torch.Tensor, b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return score + (q - k) * 0.01


def causal(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q >= k


@LEVELS
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention(level: str, masked: bool) -> None:
    """On CPU torch has its forward only."""
    mask = create_block_mask(causal, None, None, 128, 128, device="cpu") if masked else None

    def forward(m: Any, x: torch.Tensor) -> Any:
        q, k, v = m.qkv(x).view(1, 128, 3, 2, 16).permute(2, 0, 3, 1, 4)
        score = None if masked else relative
        h = flex_attention(q, k, v, score_mod=score, block_mask=mask)
        assert isinstance(h, torch.Tensor)
        return m.out(h.transpose(1, 2).reshape(1, 128, 32))

    model = module_of(forward, qkv=nn.Linear(32, 96), out=nn.Linear(32, 32))
    model.requires_grad_(False)
    check(model, torch.randn(1, 128, 32), level=level, low=["linear"])


@SETTINGS
@since("2.13", "AOTAutograd takes its results for aliases")
def test_a_loop_of_known_length(level: str, emit: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def step(carry: torch.Tensor, row: torch.Tensor) -> Any:
            carry = torch.tanh(carry @ w + row)
            return carry, carry * 1

        _, rows = scan(step, torch.zeros(16), F.linear(x, w))
        return F.linear(rows, w)

    w = (torch.randn(16, 16) / 4).requires_grad_()
    check(program, leaf(4, 16), w, level=level, emit=emit, low=["linear"])


def _cond(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def both(a: torch.Tensor) -> torch.Tensor:
        return torch.cond(a.sum() > 1, lambda a: a @ w, lambda a: a * 2, (a,))

    return torch.cond(x.sum() > 0, both, lambda a: F.linear(a, w) + torch.mm(a, w), (x,))


def _scan(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    _, rows = scan(lambda h, row: (torch.tanh(h @ w) + row, h * 2), x[0], x)
    return rows


def _map(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch._higher_order_ops.map(lambda row, w: torch.einsum("i,ij->j", row, w), x, w)


def _while_loop(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    start = (torch.zeros((), dtype=torch.int64), x.detach())
    with torch.no_grad():
        loop = torch._higher_order_ops.while_loop
        return loop(lambda i, h: i < 3, lambda i, h: (i + 1, h.matmul(w) / 4), start)[1]


@pytest.mark.parametrize(("inside", "count"), [(_cond, 3), (_scan, 1), (_map, 1), (_while_loop, 1)])
def test_the_plan_counts_the_products_inside(inside: Any, count: int) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(inside(F.linear(x, w), w), w)

    compiled = mpcompile(program, dtype=torch.float16, emit="eager", strict=True)
    compiled(torch.rand(8, 16), torch.rand(16, 16) / 16)
    (plan,) = compiled_plans(compiled)
    holders = [node for node in plan.nodes if node.products]
    assert sum(node.products for node in holders) == count
    assert sum(node["products"] for node in plan.to_dict()["nodes"]) == count
    for node in holders:
        assert node.precision == "KEEP"
        assert f"; {node.products} matrix product" in node.reason
        assert node.reason in plan.full()
    assert f"matrix products in opaque calls, all FP32: {count}\n" in plan.full()
    assert f"in FP32: {count} in calls whose bodies are not rewritten\n" in str(plan)


def test_products_under_an_autocast_of_ones_own_are_not_counted_as_fp32() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.cond(
                x.sum() > 0, lambda a: a @ w, lambda a: (a * 2).to((a @ w).dtype), (x,)
            )

    compiled = mpcompile(program, dtype=torch.bfloat16, emit="eager", strict=True)
    compiled(torch.rand(8, 16), torch.rand(16, 16))
    assert "opaque" in compiled_plans(compiled)[0].full()
    assert not any(node.products for node in compiled_plans(compiled)[0].nodes)


@LEVELS
def test_a_plan_without_opaque_calls_counts_none(level: str) -> None:
    compiled = mpcompile(F.linear, dtype=torch.float16, level=level, emit="eager", strict=True)
    compiled(torch.rand(8, 16), torch.rand(16, 16))
    (plan,) = compiled_plans(compiled)
    assert plan.counts()["LOW"] == 1
    assert not any(node.products for node in plan.nodes)
    assert "opaque" not in plan.full()
    assert "not rewritten" not in str(plan)


# -- recurrent layers ------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Linear(8, 16), layer, nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(x))[0])


LAYERS = {
    "lstm": lambda: nn.LSTM(16, 16, num_layers=2),
    "gru": lambda: nn.GRU(16, 16, batch_first=True),
    "rnn_tanh": lambda: nn.RNN(16, 8, bidirectional=True),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layer_is_one_low_node(name: str, dtype: torch.dtype) -> None:
    model = Recurrent(LAYERS[name]())
    options = {"dtype": dtype, "level": "O2", "emit": "aot_eager"}
    result = check(model, leaf(5, 3, 8), low=["linear", name], **options)
    assert result.ops("LOW").count(name) == 1


@pytest.mark.parametrize("sizes", [(1, 1), (16, 32), (40, 64)])
def test_asking_for_a_recurrent_kernel_is_safe(sizes: tuple[int, int]) -> None:
    """The probe once handed oneDNN weights that did not fit together: it corrupted the heap."""
    model = nn.LSTM(*sizes, num_layers=2, proj_size=0)
    check(model, leaf(3, 2, sizes[0]), dtype=torch.bfloat16, low=["lstm"])


class InRegion(Recurrent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize("around", [False, True], ids=["plain", "caller's autocast"])
@pytest.mark.parametrize("kind", [Recurrent, InRegion])
def test_where_nothing_is_low_an_rnn_runs_in_fp32(kind: type[Recurrent], around: bool) -> None:
    """Not compiled then, nor under anybody's autocast, for which the layer makes low states."""
    ours, twin = kind(nn.LSTM(16, 16)), Recurrent(nn.LSTM(16, 16))
    twin.load_state_dict(ours.state_dict())
    policy = Policy(full={"lstm", "linear"})
    mpcompile(ours, dtype=torch.bfloat16, policy=policy, strict=True)
    x = torch.randn(5, 3, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        out = ours(x)
    out.sum().backward()
    assert "LOW" not in compiled_plans(ours)[0].counts()
    wanted = twin(x)
    wanted.sum().backward()
    low = kind is InRegion  # a program with a region of its own returns it so: one cast, at the end
    torch.testing.assert_close(out, wanted.bfloat16() if low else wanted)
    for mine, theirs in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def traced(model: nn.Module) -> list[bool]:
    """Whether each graph that torch.compile makes of the model holds a recurrent layer."""
    found: list[bool] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> object:
        found.append(any(n.target is torch.lstm for n in gm.graph.nodes))
        return gm.forward

    torch.compile(model, backend=backend)(torch.randn(5, 3, 8))
    return found


@pytest.mark.slow("a matrix of trainings against FP64")
def test_only_our_models_have_their_recurrent_layers_traced() -> None:
    """torch.compile breaks the graph at one; its users rely on that, for it would unroll them."""
    ours, theirs = Recurrent(nn.LSTM(16, 16)), Recurrent(nn.LSTM(16, 16))
    before = traced(theirs)
    mpcompile(ours, dtype=torch.bfloat16, emit="eager", strict=True)
    for length in (5, 6):
        ours(torch.randn(length, 3, 8))
        torch._dynamo.reset()  # forgets who wants to know when it compiles
        assert traced(theirs) == before
        assert True not in before
        assert not torch._dynamo.config.allow_rnn
    assert [plan.counts()["LOW"] > 0 for plan in compiled_plans(ours)] == [True, True]


def test_within_another_compiled_function_a_recurrent_model_is_still_ours() -> None:
    ours = mpcompile(Recurrent(nn.LSTM(16, 16)), dtype=torch.bfloat16, emit="eager", strict=True)

    @torch.compile(backend="eager")
    def outer(x: torch.Tensor) -> torch.Tensor:
        return ours(x) + 1

    x = torch.randn(5, 3, 8)
    found = outer(x)
    (plan,) = compiled_plans(ours)
    assert [node.precision for node in plan.nodes if node.op == "aten::lstm"] == ["LOW"]
    torch.testing.assert_close(found, ours(x) + 1)


def test_a_compilation_that_fails_leaves_the_setting_as_it_was() -> None:
    class Breaks(Recurrent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            torch._dynamo.graph_break()
            return out

    model = mpcompile(Breaks(nn.LSTM(16, 16)), emit="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(torch.randn(5, 3, 8))
    assert not torch._dynamo.config.allow_rnn


@pytest.mark.slow("a matrix of trainings against FP64")
def test_the_plan_of_an_lstm_does_not_grow_with_its_steps() -> None:
    """Unrolled by torch.compile, 200 steps of two layers would be some thousands of nodes."""
    model = Recurrent(nn.LSTM(16, 16, num_layers=2))
    mpcompile(model, dtype=torch.float16, strict=True, emit="aot_eager")
    for steps in (5, 200):
        model(torch.randn(steps, 4, 8)).mean().backward()
    few, many = compiled_plans(model)
    assert [node.op for node in many.nodes] == [node.op for node in few.nodes]
