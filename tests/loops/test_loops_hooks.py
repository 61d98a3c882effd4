"""Hooks on modules and on tensors, as loops use them to log, to clip and to steer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import MOSTLY_O1, O1, O2, WAYS, Way, agree
from torch import nn


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 32), nn.LayerNorm(32)
        self.second, self.head = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.second(self.norm(self.first(x)))))


def train(way: Way, model: nn.Module, optimizer: Any, planted: int | None = 2) -> None:
    x, y = torch.randn(4, 8, 16), torch.randint(4, (4, 8))
    for step, update in way.updates(4, model, optimizer, planted=planted):
        update(F.cross_entropy(model(x[step]), y[step]))


def hooked_for_a_while(way: Way, choose: Callable[[Network], nn.Module]) -> None:
    """A hook on the chosen module, put on after the first step and taken off before the last."""
    model = way.model(Network())
    optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    x, y = torch.randn(4, 8, 16), torch.randint(4, (4, 8))
    handle = None
    for step, update in way.updates(4, model, optimizer, planted=2):
        if step == 1:
            handle = choose(model).register_forward_hook(lambda module, args, out: out * 2)
        elif step == 3 and handle is not None:
            handle.remove()
        update(F.cross_entropy(model(x[step]), y[step]))


@pytest.mark.slow("a loop in each way of training, against FP64")
@WAYS
def test_hooks_put_on_modules_inside_between_steps(way: Way) -> None:
    """torch.compile looks for these only if it is told to."""
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        agree(way, lambda way: hooked_for_a_while(way, lambda model: model.second))


@pytest.mark.slow("a loop in each way of training, against FP64")
@WAYS
def test_hooks_put_on_the_model_itself_between_steps(way: Way) -> None:
    agree(way, lambda way: hooked_for_a_while(way, lambda model: model))


@MOSTLY_O1
def test_activations_collected_by_forward_hooks(way: Way) -> None:
    """A penalty on features that hooks caught: gradients enter in the middle of the model."""

    def loop(way: Way) -> None:
        model = Network()
        features: dict[str, torch.Tensor] = {}

        def catch(name: str) -> Any:
            def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
                features[name] = out

            return hook

        model.first.register_forward_hook(catch("first"))
        model.second.register_forward_hook(catch("second"))
        way.model(model)
        optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=0.2))
        x, y = torch.randn(4, 8, 16), torch.randint(4, (4, 8))
        for step, update in way.updates(4, model, optimizer, planted=2):
            loss = F.cross_entropy(model(x[step]), y[step])
            update(loss + 0.1 * features["first"].square().mean() + features["second"].abs().mean())

    agree(way, loop)


@WAYS
def test_gradients_logged_by_hooks_on_the_output(way: Way) -> None:
    """What a hook on the output or the input sees is FP32 and true to size."""

    def loop(way: Way) -> None:
        model = way.model(Network())
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

    mixed = agree(way, loop)
    assert {loss.dtype for loss in mixed.losses} == {torch.float32}


def test_gradients_clipped_by_hooks_on_parameters() -> None:
    """The threshold means a true gradient; an overflow is not hidden by the clamp."""

    def loop(way: Way) -> None:
        model = way.model(Network())
        for p in model.parameters():
            p.register_hook(lambda g: g.nan_to_num(0.0, 1.0, -1.0).clamp(-0.01, 0.01))
        train(way, model, way.optimizer(torch.optim.SGD(model.parameters(), lr=1.0)))

    agree(O1, loop, tolerance=0.05)


def test_gradients_clipped_by_hooks_on_o2_parameters() -> None:
    """There a gradient would be stored times the scale; a hook is handed a true one."""

    def loop(way: Way) -> None:
        model = way.model(Network())
        optimizer = way.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        for p in model.parameters():
            p.register_hook(lambda g: g.clamp(-0.01, 0.01))
        train(way, model, optimizer)

    agree(O2, loop, tolerance=0.05)
