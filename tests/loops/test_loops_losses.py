"""Several losses and backwards: multi-task training, LBFGS, backwards that are thrown away; and
activation checkpointing of both kinds.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import MOSTLY_O1, O1, O2, PLAIN, WAYS, Way, agreeing
from module_of import module_of
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 32), nn.Tanh())
        self.kind, self.size = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.trunk(x)
        return self.kind(h), self.size(h).squeeze(1)


X, Y, Z = torch.randn(4, 8, 16), torch.randint(4, (4, 8)), torch.randn(4, 8)


@WAYS
@pytest.mark.parametrize("hit", [0, 1], ids=["first", "second"])
@agreeing()
def test_two_backwards_through_one_graph(hit: int, way: Way) -> None:
    """The overflow is in one of them; the other's gradients are fine, and must not be applied."""
    model = way.model(Tasks())
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
    for step, factor in way.steps(4, model, optimizer, planted=2):
        optimizer.zero_grad()
        kind, size = model(X[step])
        losses = [F.cross_entropy(kind, Y[step]), F.mse_loss(size, Z[step])]
        (losses[0] * (factor if hit == 0 else 1)).backward(retain_graph=True)
        (losses[1] * (factor if hit == 1 else 1)).backward()
        optimizer.step()
        way.log(losses[0])
        way.log(losses[1])


@agreeing(MOSTLY_O1)
def test_tasks_that_take_turns(way: Way) -> None:
    """A forward for each task, gradients accumulated over both, one head unused in each."""
    model = way.model(Tasks())
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
    for step, factor in way.steps(4, model, optimizer, planted=2):
        optimizer.zero_grad()
        first = F.cross_entropy(model(X[step])[0], Y[step])
        (first * factor).backward()
        second = F.mse_loss(model(X[step])[1], Z[step])
        second.backward()
        optimizer.step()
        way.log(first)
        way.log(second)


@agreeing(PLAIN, tolerance=0.1, bf16=0.3)
def test_lbfgs_with_a_closure(way: Way) -> None:
    model = way.model(Tasks())
    optimizer = way.optimizer(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
    for step, _ in way.steps(2, model):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            kind, size = model(X[step])
            loss = F.cross_entropy(kind, Y[step]) + F.mse_loss(size, Z[step])
            loss.backward()
            return loss

        way.log(optimizer.step(closure))  # type: ignore[arg-type]


def test_lbfgs_survives_an_overflow() -> None:
    """Whatever evaluation of the closure it is in, nothing becomes non-finite."""
    way = O1.again
    model = way.model(Tasks())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        kind, size = model(X[0])
        loss = F.cross_entropy(kind, Y[0]) + F.mse_loss(size, Z[0])
        (loss * (1e30 if calls in (4, 9) else 1)).backward()
        return loss

    losses = []
    for _ in range(6):
        losses.append(optimizer.step(closure).detach())  # type: ignore[arg-type]
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert calls > 9
    assert losses[-1] < losses[3] < losses[0]


@pytest.mark.parametrize("way", [pytest.param(O1, id="O1"), pytest.param(O2, id="O2")])
@agreeing()
def test_a_backward_thrown_away(way: Way) -> None:
    """Its overflow is nobody's business: the next step counts as if it had not been."""
    model = way.model(Tasks())
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    for step, factor in way.steps(4, model, optimizer, planted=2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X[step])[0], Y[step]) * factor
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        if not torch.isfinite(norm) or (way.plain and way.planting):
            optimizer.zero_grad()
            continue
        optimizer.step()
        way.log(loss)


@agreeing(WAYS)
def test_a_forward_thrown_away(way: Way) -> None:
    """`if not torch.isfinite(loss): continue`, before any backward."""
    model = way.model(Tasks())
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    for step, factor in way.steps(4, model, optimizer, planted=2):
        loss = F.mse_loss(model(X[step])[1] * factor, Z[step])
        if not torch.isfinite(loss) or (way.plain and way.planting):
            optimizer.zero_grad()
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        way.log(loss)


# -- activation checkpointing ----------------------------------------------------------------------


KINDS = pytest.mark.parametrize(
    "reentrant", [pytest.param(False, id="new"), pytest.param(True, id="reentrant")]
)


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))


def deep(run: Callable[[Any, torch.Tensor], torch.Tensor]) -> Any:
    blocks = nn.Sequential(block(), block())
    return module_of(lambda m, x: m.head(run(m, x)), blocks=blocks, head=nn.Linear(32, 5))


def looped(m: Any, x: torch.Tensor, *, broken: bool = False, **how: Any) -> torch.Tensor:
    for one in m.blocks:
        x = x + checkpoint(one, x, **how)
        if broken:
            torch._dynamo.graph_break()
    return x


NEW: dict[str, Any] = {"use_reentrant": False}
OLD: dict[str, Any] = {"use_reentrant": True}
CHECKPOINTS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "loop": lambda m, x: looped(m, x, **NEW),
    "reentrant loop": lambda m, x: looped(m, x, **OLD),
    "reentrant broken loop": lambda m, x: looped(m, x, broken=True, **OLD),
    "sequential": lambda m, x: checkpoint_sequential(m.blocks, 2, x, **NEW),
    "reentrant sequential": lambda m, x: checkpoint_sequential(m.blocks, 2, x, **OLD),
    "one segment": lambda m, x: checkpoint_sequential(m.blocks, 1, x, **OLD),
    "a list": lambda m, x: checkpoint_sequential([*m.blocks], 2, x, **OLD),
    "each layer": lambda m, x: checkpoint_sequential([*m.blocks[0], *m.blocks[1]], 8, x, **OLD),
    "no generator": lambda m, x: looped(m, x, preserve_rng_state=False, **OLD),
    "twice": lambda m, x: checkpoint_sequential(
        m.blocks, 2, checkpoint_sequential(m.blocks, 2, x, **OLD), **OLD
    ),
    "a function": lambda m, x: checkpoint(lambda h: m.blocks(h) + h, x, **OLD),
    "nested": lambda m, x: checkpoint(lambda h: looped(m, h, **NEW), x, **NEW),
    "nested, reentrant": lambda m, x: checkpoint(lambda h: looped(m, h, **OLD), x, **OLD),
    "sequential inside": lambda m, x: checkpoint(
        lambda h: checkpoint_sequential(m.blocks, 2, h, **OLD), x, **OLD
    ),
    "unchecked": lambda m, x: looped(m, x, determinism_check="none", **NEW),
}  # fmt: skip


@pytest.mark.slow_rows("a loop each", but=8)
@WAYS
@pytest.mark.parametrize(
    ("how", "emit"),
    [
        *((how, "aot_eager") for how in CHECKPOINTS),
        *((how, "inductor") for how in ("sequential", "reentrant loop", "nested")),
    ],
)
@agreeing()
@pytest.mark.filterwarnings("ignore:None of the inputs")  # as the inner one first has none
def test_checkpoints_inside_the_compiled_model(how: str, emit: str, way: Way) -> None:
    """All products are in graphs: strict. The input needs a gradient, as the reentrant kind demands
    of it.
    """
    way.emit = emit
    model = way.model(deep(CHECKPOINTS[how]))
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
    x, y = torch.randn(4, 8, 32), torch.randint(5, (4, 8))
    for step, update in way.updates(4, model, optimizer, planted=2):
        update(F.cross_entropy(model(x[step].requires_grad_()), y[step]))


def one_by_one(blocks: list[nn.Module], h: torch.Tensor, **how: Any) -> torch.Tensor:
    for one in blocks:
        h = h + checkpoint(one, h, **how)
    return h


def in_segments(blocks: list[nn.Module], h: torch.Tensor, **how: Any) -> torch.Tensor:
    return checkpoint_sequential(blocks, 2, h, **how)


@pytest.mark.slow_rows("a loop in each way of training, against FP64")
@WAYS
@KINDS
@pytest.mark.parametrize("run", [one_by_one, in_segments])
@agreeing()
def test_compiled_blocks_inside_a_checkpoint(run: Any, reentrant: bool, way: Way) -> None:
    """The loop is plain, each block is compiled, and runs its forward twice."""
    blocks = [way.model(block()) for _ in range(3)]
    parameters = [p for b in blocks for p in b.parameters()]
    optimizer = way.optimizer(torch.optim.SGD(parameters, lr=0.2))
    x, y = torch.randn(4, 8, 32), torch.randn(4, 8, 32)
    for step, update in way.updates(4, *blocks, optimizer, planted=2):
        out = run(blocks, x[step].requires_grad_(), use_reentrant=reentrant)
        update(F.mse_loss(out, y[step]))


@agreeing(WAYS)
def test_a_block_that_has_run_before_inside_a_checkpoint(way: Way) -> None:
    model = way.model(block())
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    x, y = torch.randn(3, 8, 32), torch.randn(3, 8, 32)
    model(x[0].clone().requires_grad_()).sum().backward()
    for step, update in way.updates(3, model, optimizer, planted=1):
        out = checkpoint(model, x[step].requires_grad_(), use_reentrant=False)
        update(F.mse_loss(out, y[step]))
