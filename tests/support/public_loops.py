"""What most public scripts have in common: one model, one optimizer, and the loop around them."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

Models, Optimizers = Sequence[nn.Module], Sequence[Optimizer]
Clip = Callable[..., Any]
Step = Callable[..., tuple[Any, ...]]


def optimizer(kind: Callable[..., Optimizer], lr: float, **settings: Any) -> Callable[..., Any]:
    """(the models, a factor for the learning rate) -> the optimizer of the one model."""
    return lambda models, rate: [kind(models[0].parameters(), lr=lr * rate, **settings)]


def usual(loss_of: Callable[..., Tensor]) -> Callable[[Models, Optimizers, Clip], Step]:
    """The step of such a script, of whose model and batch the loss is a function."""

    def made(models: Models, optimizers: Optimizers, clip: Clip) -> Step:
        (model,), (optimizer,) = models, optimizers

        def step(*batch: Tensor) -> tuple[Tensor, ...]:
            optimizer.zero_grad()
            loss = loss_of(model, *batch)
            loss.backward()
            clip(model.parameters())
            optimizer.step()
            return (loss.detach(),)

        return step

    return made
