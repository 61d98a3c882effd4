"""The backend: as torch.compile finds it, what the passes are told, what is told of each graph."""

import copy
import gc
import traceback
import weakref
from typing import Any

import pytest
import torch
from block_net import Net
from module_of import module_of
from processes import python
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpcompile as mp
from mpcompile import (
    LossScale,
    MPCompileError,
    MPCompileWarning,
    MPOptimizer,
    compiled_plans,
    mpcompile,
)
from mpcompile.capture import pipeline

pytestmark = pytest.mark.inside


def compiled(**options: Any) -> nn.Module:
    model = mpcompile(nn.Linear(4, 4), dtype=torch.float16, emit="eager", strict=True, **options)
    model(torch.ones(2, 4)).sum().backward()
    return model


@pytest.mark.parametrize("reads", [False, True])
def test_a_graph_that_updates_parameters_says_so(reads: bool) -> None:
    """Not one that reads them and writes elsewhere."""
    weight = nn.Parameter(torch.ones(4))

    def update(x: torch.Tensor) -> None:
        torch.add(weight, 1.0, out=x) if reads else weight.sub_(x)

    run, x = mpcompile(update, emit="eager", strict=True), torch.ones(4)
    with torch.no_grad():
        run(x)
    (plan,) = compiled_plans(run)
    assert ("left" not in plan.to_dict()) is (plan.left is None) is reads
    assert reads or plan.left.startswith("it updates parameters in place")
    assert (x.tolist(), weight.tolist()) == ([1.0 + reads] * 4, [float(reads)] * 4)


def test_an_update_by_hand_in_grad_mode_is_one() -> None:
    """As a language model's loop does it, with clipping, after a backward that ends a graph."""
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), 2.0)

    def update(loss: torch.Tensor) -> torch.Tensor:
        nn.utils.clip_grad_norm_([weight], 1.0)
        weight.data.add_(weight.grad, alpha=-1.0)
        return loss.detach()

    run = mpcompile(update, emit="eager", strict=True)
    run((weight * 1).sum())
    (plan,) = compiled_plans(run)
    assert plan.left.startswith("it updates parameters in place")
    torch.testing.assert_close(weight.detach(), torch.full((4,), 0.5))


def test_the_plan_names_every_pass_that_changed_the_graph() -> None:
    """The one that folds checkpoints back, which comes after the plan is read, too."""
    layer = nn.Linear(4, 4)

    def program(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False)

    run = mpcompile(program, dtype=torch.float16, emit="eager", strict=True)
    run(torch.ones(2, 4)).sum().backward()
    (plan,) = compiled_plans(run)
    assert plan.changed[-1] == "outline"
    assert "linear" in {node.name for node in plan.nodes}, "the plan lists checkpointed nodes"
    (plan,) = compiled_plans(compiled())
    assert "outline" not in plan.changed


def test_a_plan_does_not_change_after_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made before the last pass, around the dict that later times went into."""
    made = []
    real = pipeline.plan_of
    monkeypatch.setattr(pipeline, "plan_of", lambda *args: made.append(real(*args)) or made[-1])
    (plan,) = compiled_plans(compiled())
    assert [*plan.seconds] == ["capture", *(p.__name__ for p in pipeline.PASSES)]
    (early,) = made
    assert early.seconds == {}


# -- as a torch.compile backend -------------------------------------------------------------------


@pytest.mark.slow("compiles several models")
def test_torch_compile_finds_the_backend_without_an_import() -> None:
    code = """
import sys, torch
model = torch.nn.Linear(8, 8)
compiled = torch.compile(model, backend="mpcompile", fullgraph=True, dynamic=False,
                         options={"dtype": torch.float16, "level": "O1", "emit": "eager"})
x = torch.randn(2, 8)
out = compiled(x)
assert "mpcompile" in sys.modules
assert not torch.equal(out, model(x)) and torch.allclose(out, model(x), atol=1e-2)
"""
    python("-c", code)


def test_backend_models_have_a_scale_by_their_parameters() -> None:
    """No LossScale is handed over: graphs over the same parameters share one, recompiled or not."""
    from mpcompile.scaling.parameters import scale_of

    options = {"dtype": torch.float16, "emit": "eager"}
    models = [Net(), Net()]
    for model in models:
        compiled = torch.compile(model, backend="mpcompile", options=options, dynamic=False)
        compiled(torch.randn(4, 8)).sum().backward()
    first = scale_of(models[0].parameters())
    assert isinstance(first, LossScale)
    torch.compile(models[0], backend="mpcompile", options=options)(torch.randn(5, 8)).sum()
    assert scale_of(models[0].parameters()) is first


def test_dynamic_and_fullgraph_pass_through() -> None:
    model = mpcompile(Net(), emit="eager", dynamic=True, fullgraph=True)
    for rows in (3, 5, 9):
        model(torch.randn(rows, 8))
    assert len(compiled_plans(model)) == 1

    @mpcompile(emit="eager", fullgraph=True)
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        breaks(torch.randn(2))


def test_what_cannot_be_rewritten_warns_once_and_stays_right() -> None:
    def refuse(*given: Any) -> Any:
        raise mp.errors.CannotRewrite("the moon is full")

    x = torch.randn(4, 8)
    model = Net()
    expected = model(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpcompile.compiler.plan_graph.capture", refuse)
        mpcompile(model, emit="eager")
        with pytest.warns(MPCompileWarning, match="the moon is full") as caught:
            out = model(x)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        (plan,) = compiled_plans(model)
        assert plan.left == "the moon is full"
        assert str(plan) == "O0 float32 on cpu: left in FP32: the moon is full"
        assert plan.to_dict()["left"] == "the moon is full"
        assert len([w for w in caught if "Guards may run slower" not in str(w.message)]) == 1
        strict = mpcompile(Net(), emit="eager", strict=True)
        with pytest.raises(MPCompileError, match="the moon is full") as failed:
            strict(x)
    # A traceback shows what went wrong and where, and nothing of how Dynamo passed it on.
    error = failed.value
    assert isinstance(error.__cause__, mp.errors.CannotRewrite)
    assert error.__cause__.__traceback__ is not None
    text = "".join(traceback.format_exception(error))
    assert "in refuse" in text
    assert "BackendCompilerFailed" not in text


class _Disabled(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x @ self.weight)


@pytest.mark.parametrize(("layers", "calls"), [(0, 1), (1, 3)])
def test_a_forward_that_torch_compile_skips_whole_is_reported_once(layers: int, calls: int) -> None:
    """Once its layers have been tried each by itself: the `Sequential`, and the layer in it."""
    model = mpcompile(_Disabled(layers), emit="eager")
    for _ in range(calls - 1):
        model(torch.randn(2, 4))
    with pytest.warns(MPCompileWarning, match="no part of _Disabled was compiled"):
        model(torch.randn(2, 4))
    model(torch.randn(2, 4))  # a second warning would be an error here


def test_what_a_checkpoint_outside_of_graphs_calls_is_reported() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        x = m.first(x)
        for layer in m.layers:
            torch._dynamo.graph_break()
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    model = module_of(forward, first=nn.Linear(4, 4), layers=nn.Sequential(nn.Linear(4, 4)))
    exact, x = copy.deepcopy(model).double(), torch.randn(2, 4)
    mpcompile(model, dtype=torch.float16, emit="eager")(x)  # from here on the first is compiled
    with pytest.warns(MPCompileWarning, match=r"50% of the product FLOPs.*layers\.0"):
        model(x).sum().backward()
    exact(x.double()).sum().backward()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert torch.allclose(p.grad.double(), q.grad, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_the_first_batch_is_let_go(level: str, grad: bool) -> None:
    """A graph is compiled with its caller's tensors, and keeps none of them."""
    model = mpcompile(nn.Linear(8, 8), dtype=torch.float16, level=level, emit="aot_eager")
    optimizer = MPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), emit="eager")
    batch = torch.randn(4, 8, requires_grad=True)
    gone = weakref.ref(batch)
    with torch.set_grad_enabled(grad):
        loss = model(batch).sum()
    if grad:
        loss.backward()
        optimizer.step()
    del batch, loss
    gc.collect()
    assert gone() is None
