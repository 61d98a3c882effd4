"""Hooks that log, clip and steer; optimizers that step inside the backward, and updates by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import MOSTLY_O1, O1, O2, PLAIN, WAYS, Way, agreeing, finite, same, snapshot
from module_of import module_of
from torch import nn

HALF = pytest.mark.parametrize("way", [O1, O2], ids=str)

# -- hooks -----------------------------------------------------------------------------------------


def plain_network() -> nn.Sequential:
    layers = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)
    return nn.Sequential(*layers)


def train(way: Way, model: nn.Module, optimizer: Any, planted: int | None = 2) -> None:
    x, y = torch.randn(4, 8, 16), torch.randint(4, (4, 8))
    for step, update in way.updates(4, model, optimizer, planted=planted):
        update(F.cross_entropy(model(x[step]), y[step]))


@pytest.mark.slow("a loop in each way of training, against FP64")
@WAYS
@pytest.mark.parametrize("inside", [True, False])
@agreeing()
def test_hooks_put_on_between_steps(inside: bool, way: Way) -> None:
    """On a module inside, for which torch.compile looks only if it is told to, or on the model."""
    model = way.model(plain_network())
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    x, y = torch.randn(4, 8, 16), torch.randint(4, (4, 8))
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=not inside):
        for step, update in way.updates(4, model, optimizer, planted=2):
            if step == 1:
                on: Any = model[2] if inside else model
                handle = on.register_forward_hook(lambda module, args, out: out * 2)
            elif step == 3:
                handle.remove()
            update(F.cross_entropy(model(x[step]), y[step]))


@agreeing(MOSTLY_O1)
def test_activations_collected_by_forward_hooks(way: Way) -> None:
    """A penalty on features that hooks caught: gradients enter in the middle of the model."""
    model = plain_network()
    features: dict[str, torch.Tensor] = {}

    def catch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            features[name] = out

        return hook

    model[0].register_forward_hook(catch("first"))
    model[2].register_forward_hook(catch("second"))
    way.model(model)
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    x, y = torch.randn(4, 8, 16), torch.randint(4, (4, 8))
    for step, update in way.updates(4, model, optimizer, planted=2):
        loss = F.cross_entropy(model(x[step]), y[step])
        update(loss + 0.1 * features["first"].square().mean() + features["second"].abs().mean())


@agreeing(WAYS)
def test_gradients_logged_by_hooks_on_the_output(way: Way) -> None:
    """What a hook on the output or the input sees is FP32 and true to size."""
    model = way.model(plain_network())
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    x, y = torch.randn(4, 8, 16), torch.randint(4, (4, 8))
    for step, factor in way.steps(4, model, optimizer, planted=2):
        optimizer.zero_grad()
        batch = x[step].requires_grad_()
        batch.register_hook(lambda g: way.log(g.norm()))
        logits = model(batch)
        logits.register_hook(lambda g: way.log(g.norm()))
        (F.cross_entropy(logits, y[step]) * factor).backward()
        optimizer.step()
    assert {loss.dtype for loss in way.losses} == {torch.float32}


@agreeing(HALF, tolerance=0.05)
def test_gradients_clipped_by_hooks_on_parameters(way: Way) -> None:
    """The threshold means a true gradient, also where it would be stored times the scale; and an
    overflow is not hidden by the clamp.
    """
    model = way.model(plain_network())
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    for p in model.parameters():
        p.register_hook(lambda g: g.nan_to_num(0.0, 1.0, -1.0).clamp(-0.01, 0.01))
    train(way, model, optimizer)


# -- steps in the backward, and by hand ------------------------------------------------------------


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 5))


DATA = torch.Generator().manual_seed(7)
X, Y = torch.randn(5, 8, 16, generator=DATA), torch.randint(5, (5, 8), generator=DATA)


@agreeing(WAYS)
def test_one_optimizer_for_each_parameter_in_the_backward(way: Way) -> None:
    """As in torch's tutorial: step and free each gradient as soon as it is accumulated."""
    model = way.model(network())
    stepping_in_the_backward(way, model, lambda p: torch.optim.SGD([p], lr=0.1))
    for step, factor in way.steps(4, model, planted=2):
        loss = F.cross_entropy(model(X[step]), Y[step])
        (loss * factor).backward()
        way.log(loss)
    assert all(p.grad is None for p in model.parameters())


@agreeing(pytest.mark.parametrize("way", [O1]), tolerance=0.1)
def test_adam_in_the_backward(way: Way) -> None:
    model = way.model(network())
    optimizers = stepping_in_the_backward(way, model)
    for step, factor in way.steps(4, model, *optimizers, planted=2):
        loss = F.cross_entropy(model(X[step]), Y[step])
        (loss * factor).backward()
        way.log(loss)


def adam(parameter: torch.Tensor) -> torch.optim.Optimizer:
    return torch.optim.Adam([parameter], lr=1e-2, eps=1e-3)


def stepping_in_the_backward(
    way: Way, model: nn.Module, make: Callable[[torch.Tensor], torch.optim.Optimizer] = adam
) -> list[torch.optim.Optimizer]:
    optimizers: Any = {p: way.optimizer(make(p)) for p in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return list(optimizers.values())


@HALF
def test_an_overflow_that_begins_half_way_down(way: Way) -> None:
    """The layers above were stepped before it, with finite gradients; those below must not be."""
    way = way.again
    model: Any = way.model(
        module_of(halves, below=nn.Linear(16, 32), above=nn.Linear(32, 5), factor=1.0)
    )
    optimizers = stepping_in_the_backward(way, model)
    for step in range(4):
        before = snapshot([model.below]), snapshot([model.above])
        model.factor = 1e30 if step == 2 else 1.0
        F.cross_entropy(model(X[step]), Y[step]).backward()
        assert finite(model, *optimizers)
        if step == 2:
            assert same(before[0], snapshot([model.below]))
            assert not same(before[1], snapshot([model.above]))


def halves(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A factor on the gradient between two layers, which are two graphs."""
    h = self.below(x)
    torch._dynamo.graph_break()
    h.register_hook(lambda g: g * self.factor)
    return self.above(h)


@PLAIN
@pytest.mark.parametrize("how", ["in place", "data", "foreach", "copy_"])
@agreeing()
def test_an_update_by_hand(how: str, way: Way) -> None:
    """`with torch.no_grad(): p -= lr * p.grad`, and its relatives."""
    model = way.model(network())
    for step, _ in way.steps(4, model):
        loss = F.cross_entropy(model(X[step]), Y[step])
        model.zero_grad()
        loss.backward()
        params, grads = list(model.parameters()), [p.grad for p in model.parameters()]
        with torch.no_grad():
            if how == "foreach":
                torch._foreach_add_(params, grads, alpha=-0.1)
            for p in params if how != "foreach" else ():
                if how == "data":
                    p.data.add_(p.grad, alpha=-0.1)
                elif how == "in place":
                    p -= 0.1 * p.grad
                else:
                    p.copy_(p - 0.1 * p.grad)
        way.log(loss)


@agreeing(PLAIN)
def test_a_momentum_by_hand_that_looks_before_it_steps(way: Way) -> None:
    """The careful version: a step whose gradients are not finite is left out by the user."""
    model = way.model(network())
    momentum = [torch.zeros_like(p) for p in model.parameters()]
    for step, factor in way.steps(4, model, *momentum, planted=2):
        model.zero_grad()
        loss = F.cross_entropy(model(X[step]), Y[step])
        (loss * factor).backward()
        way.log(loss)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if not all(g.isfinite().all() for g in grads) or (way.plain and way.planting):
            continue
        with torch.no_grad():
            for p, m, g in zip(model.parameters(), momentum, grads, strict=True):
                m.mul_(0.9).add_(g)
                p.sub_(m, alpha=0.1)


@agreeing(WAYS)
def test_gradients_by_autograd_grad_assigned_by_hand(way: Way) -> None:
    model = way.model(network())
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step, factor in way.steps(4, model, optimizer, planted=2):
        loss = F.cross_entropy(model(X[step]), Y[step])
        grads = torch.autograd.grad(loss * factor, list(model.parameters()))
        for p, g in zip(model.parameters(), grads, strict=True):
            p.grad = g
        optimizer.step()
        way.log(loss)
