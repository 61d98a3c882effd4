"""Activation checkpoints: their bodies run low, and are still recomputed in the backward."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, SETTINGS, check, leaf
from module_of import function_of, module_of
from torch import fx, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import mpcompile
from mpcompile.lower import emitter

pytestmark = pytest.mark.inside

aten = torch.ops.aten


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """AOTAutograd's graphs under emit="aot_eager", forward then backward."""
    seen: list[fx.GraphModule] = []
    original = emitter._op_by_op

    def record(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        seen.append(gm)
        return original(gm, inputs)

    monkeypatch.setattr(emitter, "_op_by_op", record)
    return seen


def products(gm: fx.GraphModule) -> list[torch.dtype]:
    """The dtype of each matrix product."""
    targets = (aten.mm.default, aten.addmm.default, aten.bmm.default)
    return [n.meta["val"].dtype for n in gm.graph.nodes if n.target in targets]


class Block(nn.Module):
    """Linear, GELU, dropout, linear, LayerNorm; how it is checkpointed is the caller's business."""

    def __init__(self, run: Callable[..., Any], dropout: float = 0.0) -> None:
        super().__init__()
        self.run = run
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.dropout = nn.LayerNorm(16), nn.Dropout(dropout)

    def body(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        h = self.dropout(F.gelu(self.up(x)))
        return self.norm(self.down(h) * scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.run(self.body, x)


def plain(body: Callable[..., Any], x: torch.Tensor) -> Any:
    return body(x)


def checkpointed(body: Callable[..., Any], x: torch.Tensor) -> Any:
    return checkpoint(body, x, use_reentrant=False)


def with_keyword(body: Callable[..., Any], x: torch.Tensor) -> Any:
    return checkpoint(body, x, use_reentrant=False, preserve_rng_state=False, scale=0.5)


def nested(body: Callable[..., Any], x: torch.Tensor) -> Any:
    def outer(y: torch.Tensor) -> Any:
        return checkpoint(body, y * 2, use_reentrant=False) + y

    return checkpoint(outer, x, use_reentrant=False)


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    matters = op in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if matters else CheckpointPolicy.PREFER_RECOMPUTE


def selective(body: Callable[..., Any], x: torch.Tensor) -> Any:
    context = functools.partial(create_selective_checkpoint_contexts, save_products)
    return checkpoint(body, x, use_reentrant=False, context_fn=context)


# products in the backward: two for each linear, and those of the body a second time (the last
# linear of a body is needed for the norm's backward)
RECOMPUTED = {plain: 4, checkpointed: 6, with_keyword: 6, nested: 6, selective: 4}


@LEVELS
@pytest.mark.parametrize("run", RECOMPUTED)
def test_body_is_low_and_recomputed(
    run: Callable[..., Any], level: str, graphs: list[fx.GraphModule]
) -> None:
    result = check(Block(run), leaf(8, 16), level=level, emit="aot_eager", low=["linear"])
    assert result.ops("LOW").count("linear") == 2
    forward, backward = graphs
    assert products(forward) == [torch.float16] * 2
    assert products(backward) == [torch.float16] * RECOMPUTED[run]


@LEVELS
@pytest.mark.parametrize("run", [checkpointed, nested, selective])
def test_eager_emission(run: Callable[..., Any], level: str) -> None:
    check(Block(run), leaf(8, 16), level=level, low=["linear"])


@LEVELS
def test_what_is_saved(level: str, graphs: list[fx.GraphModule]) -> None:
    """A checkpoint saves its inputs and nothing it made."""
    check(Block(checkpointed), leaf(8, 16), level=level, emit="aot_eager")
    forward, _ = graphs
    (results,) = forward.graph.output_node().args
    made = [r for r in results[1:] if r.op != "placeholder"]
    assert all(r.meta["val"].shape != (8, 32) for r in made)


@pytest.mark.slow("a matrix of trainings against FP64")
@LEVELS
def test_two_checkpoints_in_a_row_share_a_weight(level: str) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        return m.block(m.block(x))

    model = module_of(forward, block=Block(checkpointed))
    check(model, leaf(8, 16), level=level, emit="aot_eager", low=["linear"])


@SETTINGS
def test_dropout_is_the_same_when_recomputed(level: str, emit: str) -> None:
    """Of a dropped element neither the output nor the gradient may differ from zero."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        def body(y: torch.Tensor) -> Any:
            return F.dropout(torch.sigmoid(m.linear(y)) + 1, 0.5)

        return checkpoint(body, x, use_reentrant=False)

    options = {"level": level, "emit": emit, "loss_scale": 128.0, "strict": True}
    model = module_of(forward, linear=nn.Linear(16, 64))
    mpcompile.mpcompile(model, dtype=torch.float16, **options)
    out = model(torch.zeros(1, 16))
    kept = (out != 0).flatten()
    assert 10 < kept.sum() < 54
    out.sum().backward()
    assert torch.equal(model.linear.bias.grad != 0, kept)


@LEVELS
def test_dropout_mask_is_the_fp32_programs(level: str) -> None:
    """The same seed drops the same elements, so a run can be compared with FP32's."""
    check(Block(checkpointed, dropout=0.5), leaf(8, 16), level=level, low=["linear"])


@LEVELS
def test_several_results_and_a_constant(level: str) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        def body(y: torch.Tensor) -> Any:
            h = m.linear(y)
            return h, (h * torch.tensor([2.0])).relu(), 3

        a, b, n = checkpoint(body, x, use_reentrant=False)
        return a @ b.t(), b, n

    model = module_of(forward, linear=nn.Linear(16, 16))
    check(model, leaf(8, 16), level=level, emit="aot_eager", low=["linear", "matmul"])


@LEVELS
def test_result_is_an_input(level: str) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        def body(y: torch.Tensor) -> Any:
            return y, m.linear(y)

        a, b = checkpoint(body, x * 2, use_reentrant=False)
        return a + b

    model = module_of(forward, linear=nn.Linear(16, 16))
    check(model, leaf(8, 16), level=level, emit="aot_eager", low=["linear"])


@LEVELS
def test_custom_function_in_a_body(level: str, graphs: list[fx.GraphModule]) -> None:
    def square(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    own = function_of(square, lambda ctx, g: g.clamp(-1e-3, 1e-3) * 5 * ctx.saved_tensors[0])

    def forward(m: Any, x: torch.Tensor) -> Any:
        def body(y: torch.Tensor) -> Any:
            return m.b(own.apply(m.a(y)))

        return checkpoint(body, x, use_reentrant=False)

    model = module_of(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16))
    check(model, leaf(8, 16), level=level, emit="aot_eager", low=["linear"])
    assert len(products(graphs[1])) == 5  # the first linear again


@LEVELS
def test_batch_norm_in_a_body_counts_once(level: str) -> None:
    """Recomputing must not update the running statistics again (torch's eager checkpoint does)."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
            self.norm = nn.BatchNorm1d(16)

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(F.relu(self.norm(self.a(x))))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            once = not torch.compiler.is_compiling()
            return (plain if once else checkpointed)(self.body, x)

    result = check(Net(), leaf(8, 16), level=level, emit="aot_eager", low=["linear"])
    assert result.model.norm.num_batches_tracked == 1


@pytest.mark.slow("a matrix of trainings against FP64")
@LEVELS
def test_dynamic_batch(level: str) -> None:
    model = Block(checkpointed)
    result = check(model, leaf(8, 16), level=level, emit="aot_eager", dynamic=True)
    result.model(leaf(5, 16)).sum().backward()
    assert len(result.plans) == 1
