"""A whole training step as one compiled function: forward, backward, and the optimizer's step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import DTYPES, LEVELS, TOLERANCE
from torch import nn
from whole_steps import Run, batches, net

from mpcompile import MPCompileWarning, MPOptimizer, compiled_plans, mpcompile
from mpcompile.compiler import backend

pytestmark = pytest.mark.inside

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def make_optimizer(kind: str, model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3, **settings)
    return MPOptimizer(plain, emit="eager") if kind == "generated" else plain


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return Run.usual(lambda x, y, factor: F.cross_entropy(model(x), y) * factor, optimizer)


def assert_trains_as_plain(
    kind: str, level: str, dtype: torch.dtype, emit: str, **settings: Any
) -> None:
    """Same parameters as plain PyTorch's after some steps; FP32 moments; products run low."""
    model = net()
    reference = copy.deepcopy(model)
    theirs = train_step(reference, make_optimizer("plain", reference, **settings))
    optimizer = make_optimizer(kind, model, **settings)
    ours = mpcompile(train_step(model, optimizer), dtype=dtype, level=level, emit=emit)
    start = [p.detach().clone() for p in model.parameters()]
    for batch in batches(4):  # a warning would be an error here
        torch.testing.assert_close(ours(*batch), theirs(*batch), rtol=1e-2, atol=1e-2)
    # How far training moved a parameter, not how large it is: Adam's steps are all of one size.
    for p, q, before in zip(model.parameters(), reference.parameters(), start, strict=True):
        assert p.dtype is torch.float32
        assert (p - q).norm() <= 5 * TOLERANCE[dtype] * (q - before).norm()
        state = optimizer.state[p]
        assert state["step"] == 4
        assert {v.dtype for v in state.values()} == {torch.float32}
        # Not rounded: the moments are sums of products of many gradients.
        for moment in (state["exp_avg"], state["exp_avg_sq"]):
            assert not torch.equal(moment, moment.to(dtype).float())
    low = [n.op for plan in compiled_plans(ours) for n in plan.nodes if n.precision == "LOW"]
    assert low.count("aten::linear") == 2


@DTYPES
@LEVELS
@pytest.mark.parametrize("kind", ["plain", "generated"])
def test_a_whole_step_trains_as_plain_pytorch_does(
    kind: str, level: str, dtype: torch.dtype
) -> None:
    assert_trains_as_plain(kind, level, dtype, "aot_eager")


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}], ids=str)
def test_so_do_the_optimizers_other_implementations(settings: dict[str, Any]) -> None:
    assert_trains_as_plain("plain", "O2", torch.float16, "aot_eager", **settings)


@pytest.mark.sweep("a matrix under Inductor")
@DTYPES
@LEVELS
@pytest.mark.parametrize("kind", ["plain", "generated"])
def test_under_inductor(kind: str, level: str, dtype: torch.dtype) -> None:
    assert_trains_as_plain(kind, level, dtype, "inductor")


def test_an_update_written_by_hand_is_not_rounded() -> None:
    """What the update is computed from keeps FP32, a product among it; what else is there, not."""
    weight = nn.Parameter(torch.randn(16, 16))
    mixer, x = torch.randn(16, 16), torch.randn(8, 16)
    start = weight.detach().clone()

    def update(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight.sub_(0.1 * torch.mm(mixer, grad))
        return F.linear(x, weight)

    grad = torch.randn(16, 16)
    compiled = mpcompile(update, dtype="bfloat16", level="O2", emit="aot_eager", strict=True)
    compiled(x, grad)
    torch.testing.assert_close(weight.detach(), start - 0.1 * mixer @ grad, rtol=1e-6, atol=1e-6)
    (plan,) = compiled_plans(compiled)
    decided = {n.op: (n.precision, n.rule) for n in plan.nodes}
    assert decided["aten::mm"] == ("KEEP", "update")
    assert decided["aten::linear"][0] == "LOW"


def test_an_average_of_activations_leaves_their_forward_alone() -> None:
    """A codebook kept by averaging, as VQ-VAE's: the encoder in front of it still runs low."""
    encoder, codebook = nn.Linear(16, 16), nn.Parameter(torch.randn(16))

    def forward(x: torch.Tensor) -> torch.Tensor:
        h = encoder(x)
        with torch.no_grad():
            codebook.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return h

    compiled = mpcompile(forward, dtype="bfloat16", emit="aot_eager", strict=True)
    compiled(torch.randn(8, 16))
    decided = {n.op: n.precision for plan in compiled_plans(compiled) for n in plan.nodes}
    assert decided["aten::linear"] == "LOW"
    assert decided["aten::mean"] in ("KEEP", "FULL")


def test_no_graph_is_run_to_capture_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer's state is part of the graph. Replaying its writes would count a step twice."""
    monkeypatch.setattr(backend, "is_update", lambda *_: False)
    model = net()
    optimizer = make_optimizer("plain", model)
    options = {"dtype": "float16", "emit": "aot_eager"}
    step = torch.compile(train_step(model, optimizer), backend="mpcompile", options=options)
    with pytest.warns(MPCompileWarning, match="is an attribute of it"):
        step(*batches(1)[0])
    assert optimizer.state[next(model.parameters())]["step"] == 1
